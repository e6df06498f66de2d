//! The exports, by topic.

mod context;
mod device;
mod event;
mod launch;
mod memory;
mod stream;

use crate::export::Export;

/// The newest variant that there is of a function, or the exact one of that name.
fn find(name: &str, per_thread: bool) -> Option<&'static Export> {
    const ALL: [&[Export]; 6] = [
        context::EXPORTS,
        device::EXPORTS,
        event::EXPORTS,
        launch::EXPORTS,
        memory::EXPORTS,
        stream::EXPORTS,
    ];
    let suffixes: &[&str] = if per_thread { &["_v2_ptsz", "_ptsz", "_v2", ""] } else { &["_v2", ""] };
    suffixes.iter().find_map(|suffix| {
        let wanted = format!("{name}{suffix}");
        ALL.iter().flat_map(|exports| exports.iter()).find(|export| export.name == wanted)
    })
}
