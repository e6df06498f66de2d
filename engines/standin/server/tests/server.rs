//! The server, started as a program with the staged libraries: protocol, truth log, stalls, ranks.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod harness;

use std::collections::{HashMap, HashSet};

use harness::{Client, Server};
use serde_json::Value;

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("no {key} in {value}"))
}

/// (request key, generation step) of the tokens that a step generated.
fn generated(step: &Value) -> Vec<(u64, u64)> {
    let without: Vec<u64> = step["no_token"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
    let slots = step["slots"].as_array().unwrap().iter();
    slots
        .map(|slot| (slot[0].as_u64().unwrap(), slot[1].as_u64().unwrap()))
        .filter(|(key, _)| !without.contains(key))
        .collect()
}

#[test]
fn answers_are_streamed() {
    let server = Server::start(&["--step-us", "500"]);
    let mut client = Client::connect(&server);
    // Twice, on one connection.
    for id in ["abc-1", "abc-2"] {
        let answer = client.post(
            "/v1/completions",
            &[("X-Request-ID", id)],
            r#"{"prompt":"a b c","max_tokens":7,"stream":true}"#,
        );
        assert_eq!((answer.status, answer.header("x-request-id")), (200, Some(id)));
        assert_eq!(answer.header("content-type"), Some("text/event-stream"));
        let events: Vec<&str> =
            answer.body.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap()).collect();
        let (done, events) = events.split_last().unwrap();
        assert_eq!((*done, events.len()), ("[DONE]", 7));
        for (index, event) in events.iter().enumerate() {
            let event: Value = serde_json::from_str(event).unwrap();
            assert_eq!(event["choices"][0]["text"], format!(" t{index}"));
            assert_eq!(event["choices"][0]["finish_reason"].is_null(), index < 6);
        }
    }
    let answer = client.post("/v1/completions", &[], r#"{"prompt":[1,2,3],"max_tokens":2}"#);
    assert!(answer.header("x-request-id").is_some_and(|id| !id.is_empty()));
    let body: Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(body["choices"][0]["text"], " t0 t1");
    assert_eq!(client.request("GET", "/health", &[], "").status, 200);
    let summary = server.stop().summary;
    assert_eq!((number(&summary, "requests"), number(&summary, "tokens")), (3, 16));
}

#[test]
fn bad_requests_are_refused() {
    let server = Server::start(&["--step-us", "500"]);
    let mut client = Client::connect(&server);
    for body in ["", "[]", "{}", "{\"prompt\":1}", "{\"prompt\":\"a\",\"max_tokens\":0}", "\u{0}"] {
        assert_eq!(client.post("/v1/completions", &[], body).status, 400, "{body:?}");
    }
    assert_eq!(client.request("GET", "/v1/completions", &[], "").status, 405);
    assert_eq!(client.post("/nothing", &[], "").status, 404);
    for (status, head) in [
        (431, format!("GET / HTTP/1.1\r\nx: {}", "y".repeat(20_000))),
        (505, "GET / HTTP/1.0\r\n\r\n".to_owned()),
        (413, "POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n".to_owned()),
        (501, "POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n".to_owned()),
        (400, "\r\n\r\n".to_owned()),
    ] {
        assert_eq!(Client::connect(&server).raw(head.as_bytes()).status, status, "{head:.40}");
    }
    assert_eq!(client.request("GET", "/health", &[], "").status, 200, "the server lives");
    assert_eq!(number(&server.stop().summary, "requests"), 0);
}

#[test]
fn truth_is_consistent() {
    let server = Server::start(&["--step-us", "1000", "--prefill-chunk", "100"]);
    let load = server.load(&[
        "--requests",
        "40",
        "--concurrency",
        "12",
        "--prompt-tokens",
        "1-400",
        "--output-tokens",
        "1-30",
    ]);
    assert_eq!((number(&load, "requests"), number(&load, "errors")), (40, 0));
    let stopped = server.stop();
    let requests = stopped.of("request");
    let ids: HashSet<&str> = requests.iter().filter_map(|request| request["id"].as_str()).collect();
    assert_eq!((requests.len(), ids.len()), (40, 40));
    assert!(ids.contains("load-000039"));
    assert_eq!(number(stopped.of("server")[0], "pid"), u64::from(stopped.pid));

    let mut step_of = HashMap::new();
    for step in stopped.of("step") {
        assert!(number(step, "enqueue_begin_ns") <= number(step, "enqueue_end_ns"));
        assert!(number(step, "enqueue_end_ns") <= number(step, "sync_end_ns"));
        for token in generated(step) {
            assert!(step_of.insert(token, step).is_none(), "{token:?} was generated twice");
        }
    }
    assert!(
        stopped.of("step").iter().any(|step| step["no_token"] != Value::Array(vec![])),
        "no prompt was split"
    );
    let mut tokens: HashMap<u64, Vec<&Value>> = HashMap::new();
    for token in stopped.of("token") {
        tokens.entry(number(token, "key")).or_default().push(token);
    }
    assert_eq!(step_of.len(), tokens.values().map(Vec::len).sum::<usize>());
    for request in requests {
        let key = number(request, "key");
        let tokens = &tokens[&key];
        assert_eq!(number(request, "output_tokens"), tokens.len() as u64);
        let mut before = number(request, "received_ns");
        for (index, token) in (0..).zip(tokens) {
            assert_eq!(number(token, "index"), index);
            let step = step_of[&(key, index)];
            // The engine does not wait for a connection that is behind.
            assert!(number(request, "received_ns") <= number(step, "sync_end_ns"));
            assert!(number(step, "sync_end_ns") <= number(token, "stamp_ns"));
            assert!(before <= number(token, "stamp_ns"));
            before = number(token, "stamp_ns");
            assert!(before <= number(token, "written_ns"));
        }
        assert!(before <= number(request, "end_ns"));
    }
}

#[test]
fn stalls_last_as_long_as_they_say() {
    let server = Server::start(&["--step-us", "500", "--stall", "gpu:every:20", "--stall", "lock:every:30"]);
    server.load(&["--requests", "4", "--concurrency", "4", "--output-tokens", "100"]);
    let stopped = server.stop();
    let steps: HashMap<u64, &Value> =
        stopped.of("step").into_iter().map(|s| (number(s, "batch_id"), s)).collect();
    let mut causes = HashMap::new();
    for stall in stopped.of("stall") {
        let cause = stall["cause"].as_str().unwrap();
        *causes.entry(cause).or_insert(0) += 1;
        let batch = number(stall, "batch_id");
        let step = steps[&batch];
        if cause == "gpu" {
            assert!(batch.is_multiple_of(20));
            assert!(number(step, "sync_end_ns") - number(step, "enqueue_begin_ns") >= 30_000_000);
        } else {
            // The lock was held from before the stall began.
            assert!(batch.is_multiple_of(30));
            let before = number(steps[&(batch - 1)], "sync_end_ns");
            assert!(number(step, "enqueue_begin_ns") - before >= 25_000_000);
            assert!(
                before <= number(stall, "begin_ns")
                    && number(stall, "end_ns") <= number(step, "enqueue_begin_ns")
            );
        }
    }
    assert!(causes["gpu"] >= 4 && causes["lock"] >= 3, "{causes:?}");
}

#[test]
fn cpu_and_client_stalls_happen() {
    let server = Server::start(&["--step-us", "500", "--stall", "cpu:every:50"]);
    server.load(&[
        "--requests",
        "2",
        "--concurrency",
        "2",
        "--output-tokens",
        "120",
        "--slow-clients",
        "0.5",
    ]);
    let stopped = server.stop();
    let of = |cause: &str| stopped.of("stall").into_iter().filter(|stall| stall["cause"] == cause).count();
    assert!(of("cpu") >= 2 && of("client") >= 1, "{} {}", of("cpu"), of("client"));
}

#[test]
fn ranks_run_every_iteration_together() {
    let server = Server::start(&["--step-us", "500", "--ranks", "2"]);
    server.load(&["--requests", "10", "--concurrency", "5", "--output-tokens", "5-20"]);
    let stopped = server.stop();
    let mut iterations: HashMap<u64, Vec<&Value>> = HashMap::new();
    for step in stopped.of("step") {
        iterations.entry(number(step, "batch_id")).or_default().push(step);
    }
    let iterations: Vec<_> = iterations.into_values().collect();
    assert_eq!(iterations.len() as u64, number(&stopped.summary, "steps"));
    for steps in &iterations {
        let ranks: HashSet<u64> = steps.iter().map(|step| number(step, "rank")).collect();
        assert_eq!((steps.len(), ranks), (2, HashSet::from([0, 1])));
        assert_eq!(steps[0]["slots"], steps[1]["slots"]);
        assert_ne!(steps[0]["tid"], steps[1]["tid"]);
    }
}

/// Tokens and steps that were not marked.
fn withheld(seed: &str) -> (HashSet<(u64, u64)>, HashSet<u64>, usize, usize) {
    let server = Server::start(&[
        "--step-us",
        "100",
        "--withhold-tokens",
        "20",
        "--withhold-batches",
        "20",
        "--seed",
        seed,
    ]);
    // One at a time, so that both runs have the same steps.
    server.load(&["--requests", "20", "--concurrency", "1", "--output-tokens", "20", "--prompt-tokens", "5"]);
    let stopped = server.stop();
    let unmarked = |kind: &str| {
        stopped.of(kind).into_iter().filter(|record| record["marked"] == false).collect::<Vec<_>>()
    };
    (
        unmarked("token").iter().map(|token| (number(token, "key"), number(token, "index"))).collect(),
        unmarked("step").iter().map(|step| number(step, "batch_id")).collect(),
        stopped.of("token").len(),
        stopped.of("step").len(),
    )
}

#[test]
fn withheld_marks_depend_on_the_seed_alone() {
    let first = withheld("3");
    assert_eq!((first.2, first.3), (400, 400));
    // 80 of 400 on average, with a standard deviation of 8.
    assert!((40..120).contains(&first.0.len()), "{}", first.0.len());
    assert!((40..120).contains(&first.1.len()), "{}", first.1.len());
    assert_eq!(first, withheld("3"));
    assert_ne!(first, withheld("4"));
}

#[test]
fn a_client_that_goes_away_cancels_its_request() {
    let server = Server::start(&["--step-us", "500"]);
    let mut gone = Client::connect(&server);
    gone.send(
        "POST",
        "/v1/completions",
        &[("X-Request-ID", "gone")],
        r#"{"prompt":"a","max_tokens":100000,"stream":true}"#,
    );
    gone.wait_for_input();
    drop(gone);
    // While this one is answered the server writes to the other one too.
    server.load(&["--requests", "1", "--output-tokens", "100"]);
    let stopped = server.stop();
    let request = stopped.of("request").into_iter().find(|request| request["id"] == "gone").unwrap();
    assert_eq!(request["finish"], "cancelled");
    assert!(number(request, "output_tokens") < 100_000);
}

#[test]
fn a_cpu_bound_server_says_what_it_did() {
    let server = Server::start(&["--zero-gpu", "--no-marks", "--host-us", "5"]);
    server.load(&["--requests", "50", "--output-tokens", "50"]);
    let mut client = Client::connect(&server);
    let stats: Value = serde_json::from_str(&client.request("GET", "/stats", &[], "").body).unwrap();
    assert_eq!(number(&stats, "tokens"), 2_500);
    let stopped = server.stop();
    assert_eq!(number(&stopped.summary, "tokens"), 2_500);
    assert!(number(&stopped.summary, "cpu_ns") > 0 && stopped.summary["seconds"].as_f64().unwrap() > 0.0);
    assert!(stopped.of("token").iter().all(|token| token["marked"] == false));
}

#[test]
fn shutdown_can_be_asked_for() {
    let server = Server::start(&["--step-us", "500"]);
    assert_eq!(Client::connect(&server).post("/shutdown", &[], "").status, 200);
    assert_eq!(number(&server.wait().summary, "requests"), 0);
}

#[test]
fn missing_libraries_are_named() {
    let output = harness::program().env_remove("LD_LIBRARY_PATH").output().unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("LD_LIBRARY_PATH") && message.contains("libcuda.so.1"), "{message}");
}
