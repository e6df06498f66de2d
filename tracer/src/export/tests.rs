//! All forms of one capture, read back.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Read as _;
use std::path::Path;

use base64::Engine as _;
use flate2::read::GzDecoder;
use prost::Message as _;

use super::perfetto::proto::{INSTANT, SLICE_BEGIN, SLICE_END, Trace};
use super::*;
use crate::capture::{Meta, Writer, finish};
use crate::event::{Event, Mark};
use crate::timeline::testing::{Plan, run};

/// Stands in everything that must not leave the house.
const PLANTED: &str = "planted";

fn record(dir: &Path) -> Capture {
    let plan = Plan {
        seed: 3,
        ranks: 1,
        max_batch: 4,
        requests: vec![(6, false); 20],
        withheld_tokens: 0,
        withheld_batches: 0,
        spans: false,
        scale: 100,
    };
    let mut meta = Meta::here(vec!["tracer".into()], format!("/home/{PLANTED}/serve --tenant {PLANTED}"));
    meta.host = format!("{PLANTED}.example");
    let mut writer = Writer::create(dir, meta).unwrap();
    for event in &mut run(&plan).events {
        if let Event::Mark(mark) = event
            && let Mark::RequestBegin(begin) = &mut mark.mark
        {
            begin.request_id = format!("{PLANTED}-{}", begin.request);
            begin.tenant_id = format!("{PLANTED}-tenant");
            begin.model = format!("/models/{PLANTED}/small");
            begin.adapters = format!("{PLANTED}-lora");
            begin.model_version = format!("/models/{PLANTED}/7");
            begin.engine_hash = PLANTED.to_owned();
            begin.trace_id = Some(*b"planted-trace-id");
            begin.span_id = Some(*b"planteds");
        }
        if let Event::Point(point) = event {
            point.library = format!("/opt/{PLANTED}/libengine.so");
        }
        writer.write(event).unwrap();
    }
    writer.close().unwrap();
    finish(dir).unwrap();
    Capture::open(dir).unwrap()
}

fn caption(material: &Material) -> Caption {
    let meta = &material.tables.meta;
    let facts = vec![format!("host {} target {}", meta.host, meta.target)];
    Caption {
        title: "a capture".into(),
        facts,
        notes: vec!["nothing lost".into()],
        span_ns: meta.ended_ns - meta.started_ns,
        losses: Vec::new(),
    }
}

fn unpacked(bytes: &[u8]) -> Vec<u8> {
    let mut unpacked = Vec::new();
    GzDecoder::new(bytes).read_to_end(&mut unpacked).unwrap();
    unpacked
}

fn block(page: &Page) -> Vec<u8> {
    let data = page.html.split_once("id=\"data\">").unwrap().1.split_once('<').unwrap().0;
    unpacked(&base64::prelude::BASE64_STANDARD.decode(data).unwrap())
}

/// Every byte that `tracer export` writes, by form.
fn everything(capture: &Capture, redactor: Option<&Redactor>) -> BTreeMap<String, Vec<u8>> {
    let material = Material::load(capture, redactor).unwrap();
    let caption = caption(&material);
    let mut trace = Vec::new();
    perfetto::trace(&mut trace, &material, &caption, capture.offcpu().unwrap()).unwrap();
    let mut forms = BTreeMap::from([
        ("html".to_owned(), block(&page(&material, &caption).unwrap())),
        ("perfetto".to_owned(), trace),
        ("pprof".to_owned(), unpacked(&profile(&material, &caption).unwrap())),
    ]);
    let folder = tempfile::tempdir().unwrap();
    tables(capture, Format::Csv, &folder.path().join("csv"), redactor).unwrap();
    tables(capture, Format::Parquet, &folder.path().join("parquet"), redactor).unwrap();
    for entry in fs::read_dir(folder.path().join("csv")).unwrap() {
        let path = entry.unwrap().path();
        forms.insert(path.file_name().unwrap().to_string_lossy().into(), fs::read(path).unwrap());
    }
    // Of Parquet the cells are compressed: they are looked at as CSV.
    for entry in fs::read_dir(folder.path().join("parquet")).unwrap() {
        let path = entry.unwrap().path();
        let file = fs::File::open(&path).unwrap();
        let reader = parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
        let batches: Vec<_> = reader.build().unwrap().map(Result::unwrap).collect();
        forms.insert(path.file_name().unwrap().to_string_lossy().into(), format!("{batches:?}").into_bytes());
    }
    forms
}

fn holds(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window.eq_ignore_ascii_case(text.as_bytes()))
}

#[test]
fn nothing_planted_leaves_the_house() {
    let dir = tempfile::tempdir().unwrap();
    let capture = record(dir.path());
    let trace_id = "706c616e7465642d74726163652d6964";
    let open = everything(&capture, None);
    for form in [
        "html",
        "perfetto",
        "pprof",
        "requests.csv",
        "request_ids.csv",
        "requests.parquet",
        "request_ids.parquet",
    ] {
        assert!(holds(&open[form], PLANTED), "{form} does not even have what is to be taken out");
    }
    assert!(holds(&open["requests.csv"], trace_id));
    let redactor = Redactor::new().unwrap();
    let redacted = everything(&capture, Some(&redactor));
    assert!(redacted.keys().eq(open.keys()));
    for (form, bytes) in &redacted {
        assert!(!holds(bytes, PLANTED) && !holds(bytes, trace_id), "{form} has it still");
    }
    // One request has one name in all of them.
    let name = redactor.id(&format!("{PLANTED}-1"));
    for form in ["html", "perfetto", "pprof", "requests.csv", "request_ids.csv", "requests.parquet"] {
        assert!(holds(&redacted[form], &name), "{form} has not {name}");
    }
}

#[test]
fn a_trace_nests_and_its_flows_go_forward() {
    let dir = tempfile::tempdir().unwrap();
    let capture = record(dir.path());
    let material = Material::load(&capture, None).unwrap();
    let mut bytes = Vec::new();
    perfetto::trace(&mut bytes, &material, &caption(&material), capture.offcpu().unwrap()).unwrap();
    let trace = Trace::decode(bytes.as_slice()).unwrap();
    let mut names: HashMap<u64, String> = HashMap::new();
    let mut events = Vec::new();
    for packet in trace.packet {
        let interned = packet.interned_data.into_iter().flat_map(|data| data.event_names);
        names.extend(interned.map(|name| (name.iid.unwrap(), name.name.unwrap())));
        events.extend(packet.track_event.map(|event| (packet.timestamp.unwrap(), event)));
    }
    // A reader takes events by time, equal ones in their order.
    events.sort_by_key(|(ns, _)| *ns);
    let mut open: HashMap<u64, Vec<(u64, String)>> = HashMap::new();
    let mut tokens_ns = BTreeMap::new();
    let mut flows: HashMap<u64, (usize, bool)> = HashMap::new();
    for (ns, event) in events {
        let track = event.track_uuid.unwrap();
        let stack = open.entry(track).or_default();
        match event.r#type.unwrap() {
            SLICE_BEGIN => stack.push((ns, names[&event.name_iid.unwrap()].clone())),
            SLICE_END => {
                let (begin_ns, name) = stack.pop().expect("a slice ends that did not begin");
                let parent = stack.last().map(|(_, name)| name.as_str());
                match parent {
                    Some(token) if token.starts_with("token ") => {
                        *tokens_ns.entry((track, token.to_owned())).or_insert(0) -=
                            (ns - begin_ns).cast_signed();
                    }
                    _ if name.starts_with("token ") => {
                        assert_eq!(parent, Some("request"));
                        *tokens_ns.entry((track, name)).or_insert(0) += (ns - begin_ns).cast_signed();
                    }
                    _ => {}
                }
            }
            INSTANT => assert!(stack.last().is_some_and(|(_, name)| name.starts_with("token "))),
            _ => {}
        }
        for flow in event.flow_ids {
            flows.entry(flow).or_default().0 += 1;
        }
        for flow in event.terminating_flow_ids {
            let (begun, ended) = flows.get_mut(&flow).expect("a flow ends that did not begin");
            assert!(*begun > 0 && !*ended);
            *ended = true;
        }
    }
    assert!(open.values().all(Vec::is_empty), "slices that do not end: {open:?}");
    assert_eq!(tokens_ns.len(), 120);
    assert!(tokens_ns.values().all(|ns| *ns == 0), "parts that do not fill their token: {tokens_ns:?}");
    assert_eq!(flows.len(), 120);
    assert!(flows.values().all(|(_, ended)| *ended));
}

#[test]
fn a_page_allows_its_own_script_and_style_only() {
    use sha2::{Digest as _, Sha256};
    let dir = tempfile::tempdir().unwrap();
    let material = Material::load(&record(dir.path()), None).unwrap();
    let page = page(&material, &caption(&material)).unwrap();
    assert!(page.policy.starts_with("default-src 'none'; script-src 'sha256-"), "{}", page.policy);
    assert!(page.html.contains(&page.policy));
    for (begin, end) in [("<script>", "</script>"), ("<style>", "</style>")] {
        let block = page.html.split_once(begin).unwrap().1.split_once(end).unwrap().0;
        let hash = base64::prelude::BASE64_STANDARD.encode(Sha256::digest(block));
        assert!(page.policy.contains(&hash), "{begin} is not allowed");
        assert!(!page.html.contains('%') || !block.contains("%DATA%"));
    }
    for elsewhere in
        ["http:", "https:", "//cdn", "@import", "innerHTML", "insertAdjacentHTML", "document.write", "eval("]
    {
        assert!(!page.html.contains(elsewhere), "{elsewhere}");
    }
}
