//! Starts the server with staged libraries, and talks to it.
#![expect(
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test fails by panicking; a test's modules are its own"
)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// The program, not yet started.
pub fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_standin-server"))
}

pub struct Server {
    dir: TempDir,
    child: Child,
    stdout: BufReader<std::process::ChildStdout>,
    port: String,
}

/// What a server leaves.
pub struct Stopped {
    pub pid: u32,
    pub summary: Value,
    truth: Vec<Value>,
}

impl Stopped {
    /// The truth log's records of a kind.
    pub fn of(&self, kind: &str) -> Vec<&Value> {
        self.truth.iter().filter(|record| record["kind"] == kind).collect()
    }
}

impl Server {
    pub fn start(arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        standin::stage(dir.path()).unwrap();
        let mut child = program()
            .args(arguments)
            .arg("--truth")
            .arg(dir.path().join("truth.jsonl"))
            .env("LD_LIBRARY_PATH", dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let port = line.trim().strip_prefix("listening on 127.0.0.1:").unwrap().to_owned();
        Self { dir, child, stdout, port }
    }

    /// Runs the load generator; returns its summary.
    pub fn load(&self, arguments: &[&str]) -> Value {
        let output = program().args(["load", "--port", &self.port]).args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Ends the server with a signal.
    pub fn stop(self) -> Stopped {
        let status = Command::new("kill").arg("-TERM").arg(self.child.id().to_string()).status().unwrap();
        assert!(status.success());
        self.wait()
    }

    /// Waits until the server ends.
    pub fn wait(mut self) -> Stopped {
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success());
        let truth = std::fs::read_to_string(self.dir.path().join("truth.jsonl")).unwrap();
        Stopped {
            pid: self.child.id(),
            summary: serde_json::from_str(&rest).unwrap(),
            truth: truth.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Only of use when the test failed.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

pub struct Answer {
    pub status: u16,
    headers: Vec<(String, String)>,
    /// Without chunks.
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }
}

pub struct Client(BufReader<TcpStream>);

impl Client {
    pub fn connect(server: &Server) -> Self {
        Self(BufReader::new(TcpStream::connect(format!("127.0.0.1:{}", server.port)).unwrap()))
    }

    pub fn post(&mut self, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.request("POST", path, headers, body)
    }

    pub fn request(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.send(method, path, headers, body);
        self.answer()
    }

    /// Sends bytes as they are.
    pub fn raw(&mut self, bytes: &[u8]) -> Answer {
        self.0.get_mut().write_all(bytes).unwrap();
        self.answer()
    }

    pub fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) {
        let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let text =
            format!("{method} {path} HTTP/1.1\r\n{headers}content-length: {}\r\n\r\n{body}", body.len());
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
    }

    /// Returns when the server has written something, which stays unread.
    pub fn wait_for_input(&mut self) {
        assert!(!self.0.fill_buf().unwrap().is_empty());
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn bytes(&mut self, n: usize) -> String {
        let mut bytes = vec![0; n];
        self.0.read_exact(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    fn answer(&mut self) -> Answer {
        let status = self.line().split(' ').nth(1).unwrap().parse().unwrap();
        let mut answer = Answer { status, headers: Vec::new(), body: String::new() };
        loop {
            let line = self.line();
            let Some((name, value)) = line.split_once(": ") else { break };
            answer.headers.push((name.to_owned(), value.to_owned()));
        }
        if let Some(length) = answer.header("content-length") {
            let length = length.parse().unwrap();
            answer.body = self.bytes(length);
        } else {
            loop {
                let size = usize::from_str_radix(&self.line(), 16).unwrap();
                answer.body.push_str(&self.bytes(size));
                self.line();
                if size == 0 {
                    break;
                }
            }
        }
        answer
    }
}
