/// The USDT note of the site, with this argument string: see the "UserSpaceProbeImplementation" page of systemtap.
macro_rules! note {
    ($arguments:literal) => {
        concat!(
            ".pushsection .note.stapsdt,\"\",@note\n",
            ".balign 4\n",
            // Name size, descriptor size, type NT_STAPSDT, name.
            ".long 8\n",
            ".long 9102f - 9101f\n",
            ".long 3\n",
            ".asciz \"stapsdt\"\n",
            // Descriptor: site, base (tells how far a prelinker moved the file), semaphore (none), names, arguments.
            "9101:\n",
            ".quad tracer_mark_site\n",
            ".quad _.stapsdt.base\n",
            ".quad 0\n",
            ".asciz \"tracer\"\n",
            ".asciz \"mark\"\n",
            ".asciz \"",
            $arguments,
            "\"\n",
            "9102:\n",
            ".balign 4\n",
            ".popsection\n",
            // Executable, so that it lies in the segment of the site: perf takes the site's place in the file from the
            // base's, which is right only where both are as far from their addresses (lld's segments are not).
            ".pushsection .stapsdt.base,\"axGR\",@progbits,.stapsdt.base,comdat\n",
            ".weak _.stapsdt.base\n",
            ".hidden _.stapsdt.base\n",
            "_.stapsdt.base:\n",
            ".space 1\n",
            ".size _.stapsdt.base, 1\n",
            ".popsection"
        )
    };
}
