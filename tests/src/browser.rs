//! Chromium without a window, driven over a pipe (DevTools protocol).

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

/// Names under which it is installed, best first.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
const LONGEST_WAIT: Duration = Duration::from_secs(90);

/// The name of an installed browser.
pub fn find() -> Option<&'static str> {
    NAMES.into_iter().find(|name| {
        let run = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        run.is_ok_and(|status| status.success())
    })
}

/// A browser with one page.
pub struct Browser {
    child: Child,
    pipe: ChildStdin,
    messages: Receiver<Value>,
    next_id: u64,
    session: String,
    /// Errors on the console, exceptions, and requests for anything that is not a local file.
    pub complaints: Vec<String>,
}

impl Browser {
    pub fn start(name: &str, profile: &Path) -> Result<Self> {
        // The protocol is spoken on descriptors 3 (commands) and 4 (answers).
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec "$0" "$@" 3<&0 4>&1 </dev/null >&2"#, name]);
        command.args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]);
        command.args([
            "--disable-background-networking",
            "--disable-component-update",
            "--remote-debugging-pipe",
        ]);
        command.arg(format!("--user-data-dir={}", profile.display())).arg("about:blank");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let (pipe, answers) = (child.stdin.take(), child.stdout.take());
        let (pipe, answers) = (pipe.context("no pipe")?, answers.context("no pipe")?);
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(answers).split(0) {
                let parsed = message.ok().and_then(|message| serde_json::from_slice(&message).ok());
                let Some(message) = parsed else { break };
                if sender.send(message).is_err() {
                    break;
                }
            }
        });
        let (session, complaints) = (String::new(), Vec::new());
        let mut browser = Self { child, pipe, messages, next_id: 0, session, complaints };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", &attach)?;
        browser.session = session["sessionId"].as_str().context("no session")?.to_owned();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), &json!({}))?;
        }
        let size = json!({ "width": 1400, "height": 1300, "deviceScaleFactor": 1, "mobile": false });
        browser.call("Emulation.setDeviceMetricsOverride", &size)?;
        Ok(browser)
    }

    /// Calls a method and waits for its answer.
    pub fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.next_id += 1;
        let mut message = json!({ "id": self.next_id, "method": method, "params": params });
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        self.pipe.write_all(&bytes).context("the browser has ended")?;
        loop {
            let message =
                self.messages.recv_timeout(LONGEST_WAIT).with_context(|| format!("no answer to {method}"))?;
            if message["id"] == self.next_id {
                ensure!(message.get("error").is_none(), "{method}: {}", message["error"]);
                return Ok(message["result"].clone());
            }
            self.hear(&message);
        }
    }

    fn hear(&mut self, event: &Value) {
        let params = &event["params"];
        let is_bad = match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => params["type"] == "error" || params["type"] == "warning",
            Some("Log.entryAdded") => params["entry"]["level"] == "error",
            Some("Network.requestWillBeSent") => {
                let url = params["request"]["url"].as_str().unwrap_or_default();
                !url.starts_with("file:") && url != "about:blank"
            }
            _ => false,
        };
        if is_bad {
            self.complaints.push(event.to_string());
        }
    }

    /// The value of an expression, once its promise, where it is one, has come true.
    pub fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.call("Runtime.evaluate", &params)?;
        if let Some(exception) = result.get("exceptionDetails") {
            bail!("{expression}: {exception}");
        }
        Ok(result["result"]["value"].clone())
    }

    pub fn text(&mut self, id: &str) -> Result<String> {
        let value = self.evaluate(&format!("document.getElementById('{id}').textContent"))?;
        Ok(value.as_str().unwrap_or_default().to_owned())
    }

    /// Waits until an expression is true.
    pub fn wait(&mut self, expression: &str) -> Result<()> {
        let poll = format!(
            "new Promise((done) => {{ let n = 0; const look = () => {{ let is = false; try {{ is = {expression}; }} \
             catch {{}} if (is || ++n > 500) done(Boolean(is)); else setTimeout(look, 40); }}; look(); }})"
        );
        ensure!(self.evaluate(&poll)? == true, "it never came true that {expression}");
        Ok(())
    }

    pub fn open(&mut self, page: &Path, hash: &str) -> Result<()> {
        // A new document, even where only the part behind # differs.
        self.call("Page.navigate", &json!({ "url": "about:blank" }))?;
        self.wait("location.href === 'about:blank'")?;
        self.call("Page.navigate", &json!({ "url": format!("file://{}{hash}", page.display()) }))?;
        self.wait("document.documentElement.dataset.ready === 'true'")
    }

    /// Presses a key; `shift` is held meanwhile.
    pub fn press(&mut self, key: &str, shift: bool) -> Result<()> {
        let code = match key {
            "Enter" => 13,
            "Escape" => 27,
            "Tab" => 9,
            "ArrowLeft" => 37,
            "ArrowUp" => 38,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            _ => 0,
        };
        let mut params = json!({ "key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": u8::from(shift) * 8 });
        params["type"] = json!(if key == "Enter" { "keyDown" } else { "rawKeyDown" });
        if key == "Enter" {
            params["text"] = json!("\r");
        }
        self.call("Input.dispatchKeyEvent", &params)?;
        params["type"] = json!("keyUp");
        self.call("Input.dispatchKeyEvent", &params)?;
        Ok(())
    }

    pub fn type_text(&mut self, text: &str) -> Result<()> {
        self.call("Input.insertText", &json!({ "text": text }))?;
        Ok(())
    }

    /// Drags within an element, between two places that are shares of its width and height.
    pub fn drag(&mut self, id: &str, from: (f64, f64), to: (f64, f64)) -> Result<()> {
        self.evaluate(&format!("document.getElementById('{id}').scrollIntoView({{ block: 'center' }})"))?;
        let rect = format!(
            "(() => {{ const b = document.getElementById('{id}').getBoundingClientRect(); \
             return [b.left, b.top, b.width, b.height]; }})()"
        );
        let rect = self.evaluate(&rect)?;
        let side = |i: usize| rect[i].as_f64().unwrap_or_default();
        let place = |(x, y): (f64, f64)| (side(0) + x * side(2), side(1) + y * side(3));
        for (kind, at) in [("mousePressed", from), ("mouseMoved", to), ("mouseReleased", to)] {
            let (x, y) = place(at);
            let params =
                json!({ "type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", &params)?;
        }
        Ok(())
    }

    pub fn click(&mut self, id: &str) -> Result<()> {
        self.drag(id, (0.5, 0.5), (0.5, 0.5))
    }

    /// A picture of the whole page, where `TRACER_SCREENSHOTS` names a folder for it.
    pub fn screenshot(&mut self, name: &str) -> Result<()> {
        let Some(folder) = std::env::var_os("TRACER_SCREENSHOTS") else { return Ok(()) };
        let shot = self.call("Page.captureScreenshot", &json!({ "captureBeyondViewport": true }))?;
        let picture = shot["data"].as_str().context("no picture")?;
        let file = File::create(Path::new(&folder).join(name).with_extension("png"))?;
        let mut decode = Command::new("base64").arg("-d").stdin(Stdio::piped()).stdout(file).spawn()?;
        decode.stdin.take().context("no pipe")?.write_all(picture.as_bytes())?;
        ensure!(decode.wait()?.success(), "the picture cannot be decoded");
        Ok(())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
