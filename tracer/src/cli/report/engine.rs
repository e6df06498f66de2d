//! Which engines ran: their files, and the libraries that executed them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use crate::cli::table::{Side, Style, Table};
use crate::cli::units::{clean, count, date_time};
use crate::hex::hex;
use crate::timeline::tables::Tables;

/// Path, fingerprint, bytes and time of a file.
type Identity<'a> = (&'a str, &'a [u8], u64, u64);

/// The steps of one engine's file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct EngineLine {
    /// As the process sees it; `null`: not known, or a process has opened several.
    pub(crate) path: Option<String>,
    pub(crate) bytes: Option<u64>,
    /// UTC; of the file.
    pub(crate) modified_at: Option<String>,
    /// SHA-256 of the first and last 4096 bytes and the size; `null`: not known.
    pub(crate) fingerprint: Option<String>,
    /// Version of the library that executed it, as it says.
    pub(crate) library_version: Option<String>,
    /// What the data types of its tensors imply: `fp16` and the like, or `unknown`.
    pub(crate) quantization: String,
    pub(crate) steps: u64,
}

/// An engine's file that a process has opened, and what could not be known of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct FileProblem {
    pub(crate) tgid: u32,
    pub(crate) path: String,
    pub(crate) problem: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Engines {
    pub(crate) engines: Vec<EngineLine>,
    /// Different files that were opened; with several in a process, which one a step ran is not known.
    pub(crate) files: u64,
    pub(crate) problems: Vec<FileProblem>,
}

impl Engines {
    pub(crate) fn new(tables: &Tables) -> Self {
        let mut steps: BTreeMap<(Option<Identity>, &str, &str), u64> = BTreeMap::new();
        for step in &tables.steps {
            let engine = step.engine.as_deref().map(|engine| {
                (engine.path.as_str(), engine.fingerprint.as_slice(), engine.bytes, engine.modified_ns)
            });
            *steps.entry((engine, &step.engine_version, &step.quantization)).or_default() += 1;
        }
        let line =
            |((engine, version, quantization), steps): ((Option<Identity>, &str, &str), u64)| EngineLine {
                path: engine.map(|(path, ..)| path.to_owned()),
                bytes: engine.map(|(_, _, bytes, _)| bytes),
                modified_at: engine.and_then(|(.., modified_ns)| date_time(modified_ns)),
                fingerprint: engine.map(|(_, sum, ..)| hex(sum)).filter(|sum| !sum.is_empty()),
                library_version: Some(version.to_owned()).filter(|version| !version.is_empty()),
                quantization: quantization.to_owned(),
                steps,
            };
        let mut files: Vec<(&str, &[u8])> = tables
            .engine_files
            .iter()
            .map(|file| (file.path.as_str(), file.fingerprint.as_slice()))
            .collect();
        files.sort_unstable();
        files.dedup();
        let bad = tables.engine_files.iter().filter(|file| !file.problem.is_empty());
        Self {
            engines: steps.into_iter().map(line).collect(),
            files: files.len() as u64,
            problems: bad
                .map(|file| FileProblem {
                    tgid: file.process.tgid,
                    path: file.path.clone(),
                    problem: file.problem.clone(),
                })
                .collect(),
        }
    }

    /// Whether there is anything to say.
    pub(crate) fn is_known(&self) -> bool {
        self.files > 0 || self.engines.iter().any(|line| line.library_version.is_some())
    }

    pub(crate) fn text(&self, style: Style, out: &mut String) {
        use Side::{Left, Right};
        let mut table = Table::new([
            ("steps", Right),
            ("library", Left),
            ("mode", Left),
            ("bytes", Right),
            ("fingerprint", Left),
            ("changed", Left),
            ("file", Left),
        ]);
        let known =
            |text: &Option<String>, most| text.as_ref().map_or("unknown".into(), |text| clean(text, most));
        for line in &self.engines {
            table.push([
                count(line.steps),
                known(&line.library_version, 14),
                clean(&line.quantization, 8),
                line.bytes.map_or("–".into(), count),
                line.fingerprint.as_ref().map_or("unknown".into(), |sum| sum.chars().take(12).collect()),
                line.modified_at.as_ref().map_or("–".into(), |at| at.chars().take(16).collect()),
                known(&line.path, 400),
            ]);
        }
        out.push_str(&table.render(style));
        if self.files > 1 && self.engines.iter().any(|line| line.path.is_none()) {
            let line = format!(
                "  {} engine files were opened: where one process opened several, which one a step ran is unknown",
                count(self.files)
            );
            let _ = writeln!(out, "{}", style.note(&line));
        }
        for FileProblem { tgid, path, problem } in &self.problems {
            let line = format!("  process {tgid}: {}: {}", clean(path, 60), clean(problem, 80));
            let _ = writeln!(out, "{}", style.note(&line));
        }
    }
}
