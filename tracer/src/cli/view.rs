//! `tracer view`: the page of a capture, served on loopback.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use axum::Router;
use axum::body::Bytes;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;

use super::export::caption;
use super::picture;
use crate::export::{Material, Page, page};

/// Explore a capture in a browser: select tokens, see what their time was spent on
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tracer view trace
  ssh -L 8080:127.0.0.1:8080 node tracer view trace --port 8080

The page is the one that `tracer export --html` writes. Only this machine reaches it; Ctrl-C ends it.")]
pub(crate) struct Args {
    /// Folder of the capture
    capture: PathBuf,
    /// Port on 127.0.0.1; 0: any free one
    #[arg(long, default_value_t = 0, value_name = "PORT")]
    port: u16,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let capture = picture::open(&args.capture)?;
    let material = Material::load(&capture, None)?;
    let page = page(&material, &caption(&capture, &material)?)?;
    drop(material);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(page, args.port))?;
    Ok(ExitCode::SUCCESS)
}

async fn serve(page: Page, port: u16) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .await
        .with_context(|| format!("cannot listen on 127.0.0.1:{port}; --port 0 takes a free one"))?;
    let address = listener.local_addr()?;
    println!("http://{address}/");
    let end = async {
        // Without a signal handler Ctrl-C still ends the process.
        let _ = tokio::signal::ctrl_c().await;
    };
    axum::serve(listener, router(page, address))
        .with_graceful_shutdown(end)
        .await
        .context("cannot serve the page")
}

/// One page at `/`, and nothing else: no request names a file.
fn router(page: Page, address: SocketAddr) -> Router {
    let html = Bytes::from(page.html);
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::CONTENT_SECURITY_POLICY, format!("{}; frame-ancestors 'none'", page.policy)),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::REFERRER_POLICY, "no-referrer".to_owned()),
        (header::CACHE_CONTROL, "no-store".to_owned()),
    ];
    let hosts: Arc<[String]> =
        [format!("127.0.0.1:{}", address.port()), format!("localhost:{}", address.port())].into();
    let answer = get(move || async move { (headers.clone(), html.clone()) });
    Router::new().route("/", answer).layer(middleware::from_fn(move |request: Request, next: Next| {
        let is_ours = is_for(&hosts, request.headers());
        async move {
            let answer: Response = if is_ours {
                next.run(request).await
            } else {
                (StatusCode::FORBIDDEN, "this page answers to 127.0.0.1 only\n").into_response()
            };
            Ok::<_, Infallible>(answer)
        }
    }))
}

/// Whether the browser meant this server: a name that somebody else's DNS points here is not one of its hosts.
fn is_for(hosts: &[String], headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    host.is_some_and(|host| hosts.iter().any(|known| known.eq_ignore_ascii_case(host)))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    use super::*;

    /// Status line and body of the answer to a request as it stands.
    fn ask(address: SocketAddr, request: &str) -> (String, String) {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_owned(), body.to_owned())
    }

    #[test]
    fn one_page_for_this_machine_and_nothing_else() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let page = Page { html: "<p>page</p>".into(), policy: "default-src 'none'".into() };
        let app = router(page, address);
        std::thread::spawn(move || runtime.block_on(async { axum::serve(listener, app).await }));
        let host = format!("Host: {address}\r\nConnection: close\r\n\r\n");
        let (head, body) = ask(address, &format!("GET / HTTP/1.1\r\n{host}"));
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert!(
            head.contains("content-security-policy: default-src 'none'; frame-ancestors 'none'"),
            "{head}"
        );
        assert_eq!(body, "<p>page</p>");
        for (request, status) in [
            (format!("POST / HTTP/1.1\r\nContent-Length: 0\r\n{host}"), "405"),
            (format!("DELETE / HTTP/1.1\r\n{host}"), "405"),
            (format!("GET /../../etc/passwd HTTP/1.1\r\n{host}"), "404"),
            (format!("GET /%2e%2e/meta.json HTTP/1.1\r\n{host}"), "404"),
            ("GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n".to_owned(), "403"),
            ("GET / HTTP/1.1\r\nHost: 127.0.0.1:1\r\nConnection: close\r\n\r\n".to_owned(), "403"),
        ] {
            let (head, body) = ask(address, &request);
            assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{request}: {head}");
            assert!(!body.contains("page</p>") && !body.contains("root:"));
        }
    }
}
