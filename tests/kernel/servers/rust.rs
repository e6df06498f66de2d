//! The same with axum, in this process.

use std::{convert::Infallible, time::Duration};

use anyhow::{Context, Result};
use axum::{
    Router,
    body::Body,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::post,
};
use futures_util::stream;
use tokio::{net::TcpListener, runtime::Runtime, time::sleep};

/// Serves while the runtime lives; with its port.
pub(super) fn serve() -> Result<(Runtime, u16)> {
    let runtime = Runtime::new().context("starting threads")?;
    let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0)))?;
    let port = listener.local_addr()?.port();
    let app = Router::new().route("/v1/completions", post(completions));
    runtime.spawn(async move { axum::serve(listener, app).await });
    Ok((runtime, port))
}

async fn completions(body: String) -> Response {
    let asked = serde_json::from_str::<serde_json::Value>(&body).ok();
    let Some(tokens) = asked.and_then(|asked| asked["max_tokens"].as_u64()) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let events = stream::unfold(0, move |number| async move {
        let event = match number {
            _ if number < tokens => {
                sleep(Duration::from_millis(2)).await;
                format!("data: {{\"choices\":[{{\"index\":0,\"text\":\" word{number}\"}}]}}\n\n")
            }
            _ if number == tokens => "data: [DONE]\n\n".into(),
            _ => return None,
        };
        Some((Ok::<_, Infallible>(event), number + 1))
    });
    ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response()
}
