//! Targets change: children, other programs, libraries that come late.

use anyhow::{Result, ensure};
use tracer::{
    event::{Event, ProcessAction},
    probe::{Session, process},
};

use crate::{
    Test,
    fixture::{Built, Running, calls_only, numbers, trace},
};

pub(crate) const TESTS: &[(&str, Test)] =
    &[("follow::children_and_programs", children_and_programs), ("follow::late_library", late_library)];

fn children_and_programs() -> Result<()> {
    let trace = trace(&["children"], calls_only())?;
    let said = numbers(&trace.said)?;
    ensure!(said[1] == 3, "the child ended with {}", said[1]);
    let child = u32::try_from(said[0])?;
    let of_child: Vec<_> =
        trace.processes().into_iter().filter(|event| event.origin.process.tgid == child).collect();
    let actions: Vec<_> = of_child.iter().map(|event| event.action).collect();
    ensure!(actions == [ProcessAction::Fork, ProcessAction::Exec, ProcessAction::Exit], "{actions:?}");
    ensure!(of_child[0].parent_tgid == trace.pid && of_child[1].comm == "sh", "{of_child:?}");
    let ids: Vec<_> = of_child.iter().map(|event| event.origin.process).collect();
    ensure!(ids[0].start_ticks > 0 && ids.iter().all(|id| *id == ids[0]), "the identity changed: {ids:?}");
    let parent = trace.processes().into_iter().find(|event| event.action == ProcessAction::Found);
    ensure!(parent.is_some_and(|event| event.origin.process.tgid == trace.pid), "{parent:?}");
    Ok(())
}

fn late_library() -> Result<()> {
    let library = Built::get()?.path("libfixture_late.so");
    let mut running = Running::start(&["late", &library.to_string_lossy()])?;
    let mut session = Session::start(calls_only(), Built::get()?.profiles()?)?;
    session.add(&process::find(running.pid())?)?;
    let mut events = Vec::new();
    running.tell()?;
    let line = running.line(&mut session, &mut events)?;
    ensure!(line == "opened", "{line}");
    // The loader has told about the new library before `opened` was said; one more drain acts on it.
    session.drain(&mut events);
    running.tell()?;
    running.line(&mut session, &mut events)?;
    session.stop(&mut events);
    let late: Vec<u32> = events
        .iter()
        .filter_map(|event| match event {
            Event::Point(point)
                if point.library.ends_with("libfixture_late.so") && point.name == "fixture_work" =>
            {
                Some(point.id)
            }
            _ => None,
        })
        .collect();
    let calls =
        events.iter().filter(|event| matches!(event, Event::Call(call) if late.contains(&call.point)));
    ensure!(calls.count() == 10, "calls into a library that was opened late are missing");
    running.end()
}
