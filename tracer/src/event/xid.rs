//! Xids: errors of a GPU that NVIDIA's driver writes to the kernel log.
//!
//! In: lines as `/dev/kmsg` gives them (`PRIORITY,SEQUENCE,MICROSECONDS,FLAGS…;MESSAGE`). Out: the Xids among them.

/// An error of a GPU. What the numbers mean: NVIDIA's "XID Errors".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Xid {
    /// When the recorder read the line.
    pub time_ns: u64,
    /// The kernel log's own stamp: ns since boot on the clock of the CPU that logged, which is near to, but not
    /// CLOCK_MONOTONIC.
    pub kernel_log_ns: u64,
    /// Domain, bus and device, in lower case: `0000:3b:00`.
    pub pci: String,
    pub xid: u32,
    /// What follows the number, cut to [`MESSAGE_BYTES`].
    pub message: String,
}

/// Longest message that is kept.
pub const MESSAGE_BYTES: usize = 400;

/// The facility of a line's priority, which is 0 for the kernel: a program's line is not the driver's.
const FACILITY: u32 = !7;

impl Xid {
    /// An Xid, if the line is one.
    ///
    /// ```
    /// use tracer::event::Xid;
    /// let line = "4,1234,5000123,-;NVRM: Xid (PCI:0000:3B:00): 79, pid=77, GPU has fallen off the bus.";
    /// let xid = Xid::parse(line, 9).unwrap();
    /// assert_eq!((xid.xid, xid.pci.as_str(), xid.kernel_log_ns), (79, "0000:3b:00", 5_000_123_000));
    /// ```
    #[must_use]
    pub fn parse(line: &str, time_ns: u64) -> Option<Self> {
        let (prefix, message) = line.split_once(';')?;
        let mut fields = prefix.split(',');
        let priority: u32 = fields.next()?.parse().ok()?;
        let stamp_us: u64 = fields.nth(1)?.parse().ok()?;
        if priority & FACILITY != 0 {
            return None;
        }
        let rest = message.strip_prefix("NVRM: Xid (")?;
        let (place, rest) = rest.split_once("): ")?;
        let place = place.strip_prefix("PCI:").unwrap_or(place);
        let is_place = |c: char| c.is_ascii_hexdigit() || c == ':' || c == '.';
        if place.is_empty() || place.len() > 32 || !place.chars().all(is_place) {
            return None;
        }
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (number, rest) = rest.split_at_checked(digits)?;
        let text = rest.trim_start_matches([',', ' ']).trim_end();
        Some(Self {
            time_ns,
            kernel_log_ns: stamp_us.saturating_mul(1_000),
            pci: place.to_ascii_lowercase(),
            xid: number.parse().ok()?,
            message: text[..text.floor_char_boundary(MESSAGE_BYTES)].to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(message: &str) -> Option<(String, u32, String)> {
        Xid::parse(&format!("4,1,2,-;{message}"), 3).map(|xid| (xid.pci, xid.xid, xid.message))
    }

    #[test]
    fn drivers_of_all_ages() {
        let fell = "GPU has fallen off the bus.";
        for (line, pci, xid, message) in [
            ("NVRM: Xid (PCI:0000:3B:00): 79, GPU has fallen off the bus.", "0000:3b:00", 79, fell),
            ("NVRM: Xid (0000:03:00): 13, 0003 00000000", "0000:03:00", 13, "0003 00000000"),
            (
                "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=x, Ch 08",
                "0000:3b:00",
                31,
                "pid=7, name=x, Ch 08",
            ),
            ("NVRM: Xid (PCI:0000:3b:00): 119", "0000:3b:00", 119, ""),
        ] {
            assert_eq!(parse(line), Some((pci.to_owned(), xid, message.to_owned())), "{line}");
        }
    }

    #[test]
    fn what_is_no_xid() {
        for line in [
            "",
            "NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
            "NVRM: Xid (PCI:0000:3b:00): , x",
            "NVRM: Xid (PCI:0000:3b:00): 99999999999, x",
            "NVRM: Xid (): 79, x",
            "NVRM: Xid (PCI:\u{1b}[31m): 79, x",
            "x NVRM: Xid (PCI:0000:3b:00): 79, x",
        ] {
            assert_eq!(parse(line), None, "{line}");
        }
        // A program wrote this one to /dev/kmsg.
        assert_eq!(Xid::parse("12,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, x", 0), None);
        assert_eq!(Xid::parse(" SUBSYSTEM=pci", 0), None);
    }

    proptest! {
        #[test]
        fn hostile_lines_do_no_harm(
            head in "[0-9,;-]{0,30}",
            place in "\\PC{0,40}",
            number in "[0-9]{0,12}",
            message in "\\PC{0,900}",
        ) {
            let _ = Xid::parse(&message, 0);
            let _ = Xid::parse(&format!("{head};NVRM: Xid ({place}): {number}{message}"), 0);
            if let Some(xid) = Xid::parse(&format!("4,1,{number},-;NVRM: Xid (PCI:{place}): {number}{message}"), 0) {
                prop_assert!(xid.message.len() <= MESSAGE_BYTES && xid.pci.is_ascii());
            }
        }

        #[test]
        fn what_is_written_is_read(xid: u32, stamp_us in 0u64..1 << 50, message in "[a-zA-Z=][a-z ]{0,50}[a-z]") {
            let line = format!("4,9,{stamp_us},-,caller=T1;NVRM: Xid (PCI:000A:ff:1f): {xid}, {message}");
            let expected = Xid { time_ns: 5, kernel_log_ns: stamp_us * 1_000, pci: "000a:ff:1f".into(), xid, message };
            prop_assert_eq!(Xid::parse(&line, 5), Some(expected));
        }
    }
}
