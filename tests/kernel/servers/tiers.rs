//! nginx in front of uvicorn, both traced: each request is seen at both, by one name and in two processes.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use tracer::{
    event::{Event, HttpBegin, HttpEnd, HttpFinish},
    probe::process,
};

use super::{Server, free_port, load, start, trace, uvicorn, uvicorn_command};

/// How nginx reaches uvicorn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hop {
    Tcp,
    Unix,
}

pub(super) fn both(hop: Hop) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("uvicorn.sock");
    let (back, upstream) = match hop {
        Hop::Tcp => {
            let (back, port) = uvicorn(&["--loop", "uvloop"])?;
            (back, format!("127.0.0.1:{port}"))
        }
        Hop::Unix => (behind_a_file(&socket)?, format!("unix:{}:", socket.display())),
    };
    let (front, port) = nginx(folder.path(), &upstream)?;
    let mut traced = process::tree(back.id())?;
    traced.extend(process::tree(front.id())?);
    let (events, ledger, expected) = trace(&traced, move || load(port))?;
    let losses: Vec<_> = ledger.iter().filter(|row| row.loss && row.count > 0).collect();
    ensure!(losses.is_empty(), "{losses:?}");

    let of = |server: &Server| -> Result<Vec<u32>> {
        Ok(process::tree(server.id())?.iter().map(|found| found.id.tgid).collect())
    };
    let (front, back) = (tier(&events, &of(&front)?)?, tier(&events, &of(&back)?)?);
    let mut hops = Vec::new();
    for (name, tokens) in &expected {
        let (outer, outer_end) =
            front.get(name.as_str()).with_context(|| format!("nginx did not see {name}"))?;
        let (inner, inner_end) =
            back.get(name.as_str()).with_context(|| format!("uvicorn did not see {name}"))?;
        ensure!(outer_end.tokens == *tokens && inner_end.tokens == *tokens, "{outer_end:?} {inner_end:?}");
        ensure!(outer.read_ns < inner.read_ns, "{name} was behind before it was in front");
        hops.push(inner.read_ns - outer.read_ns);
    }
    ensure!(front.len() == expected.len() && back.len() == expected.len(), "there are others, too");
    hops.sort_unstable();
    println!("  {} requests at both; nginx → uvicorn p50 {} µs", hops.len(), hops[hops.len() / 2] / 1_000);
    Ok(())
}

type Tier<'a> = BTreeMap<&'a str, (&'a HttpBegin, &'a HttpEnd)>;

/// The exchanges of some processes, by name.
fn tier<'a>(events: &'a [Event], processes: &[u32]) -> Result<Tier<'a>> {
    let mut tier = BTreeMap::new();
    for event in events {
        let Event::HttpEnd(end) = event else { continue };
        let begin = events.iter().find_map(|event| match event {
            Event::HttpBegin(begin) if begin.exchange == end.exchange => Some(begin),
            _ => None,
        });
        let begin = begin.context("an end without a begin")?;
        if processes.contains(&begin.origin.process.tgid) && begin.method == "POST" {
            ensure!(end.finish == HttpFinish::Done && end.status == 200, "{begin:?} {end:?}");
            ensure!(tier.insert(begin.request_id.as_str(), (begin, end)).is_none(), "twice: {begin:?}");
        }
    }
    Ok(tier)
}

fn behind_a_file(socket: &Path) -> Result<Server> {
    let mut command = uvicorn_command()?;
    let server = Server(command.arg("--uds").arg(socket).spawn().context("starting uvicorn")?);
    let patience = Instant::now() + Duration::from_secs(30);
    while !socket.exists() {
        ensure!(Instant::now() < patience, "uvicorn does not listen");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(server)
}

fn nginx(folder: &Path, upstream: &str) -> Result<(Server, u16)> {
    let port = free_port()?;
    let folder = folder.display();
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|what| format!("{what}_temp_path {folder}/{what}; "))
        .concat();
    let text = format!(
        "daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors; events {{}}\n\
         http {{ access_log off; {paths} proxy_buffering off;\n\
           server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://{upstream}; }} }} }}\n"
    );
    let file = format!("{folder}/nginx.conf");
    fs::write(&file, text)?;
    Ok((start(Command::new("nginx").args(["-c", &file]), port)?, port))
}
