//! One page that shows a capture, and needs nothing else.
//!
//! The data lies in it as base64 of gzip, so that no name of the capture is ever read as markup: the script puts names in
//! as text. The page allows its own style and script by their hashes, and nothing from anywhere.

use std::io::Write as _;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest as _, Sha256};

use super::{Caption, Material, data};

const PAGE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = concat!(
    "'use strict';\n",
    include_str!("page/words.js"),
    include_str!("page/data.js"),
    include_str!("page/model.js"),
    include_str!("page/heatmap.js"),
    include_str!("page/flame.js"),
    include_str!("page/panels.js"),
    include_str!("page/main.js"),
);

/// A page, and what it may do.
pub struct Page {
    pub html: String,
    /// Its Content-Security-Policy, which it also says itself.
    pub policy: String,
}

/// The page of a capture.
///
/// # Errors
/// When it cannot be compressed.
pub fn page(material: &Material, caption: &Caption) -> std::io::Result<Page> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::new(6));
    packed.write_all(&data::block(material, caption)?)?;
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; base-uri 'none'; form-action 'none'",
        allowed(SCRIPT),
        allowed(STYLE)
    );
    let parts = [
        ("%CSP%", policy.as_str()),
        ("%STYLE%", STYLE),
        ("%DATA%", &BASE64_STANDARD.encode(packed.finish()?)),
        ("%SCRIPT%", SCRIPT),
    ];
    // In order of their places, so that nothing that was put in is looked at again.
    let (mut html, mut rest) = (String::new(), PAGE);
    for (place, part) in parts {
        if let Some((before, after)) = rest.split_once(place) {
            html.extend([before, part]);
            rest = after;
        }
    }
    html.push_str(rest);
    Ok(Page { html, policy })
}

/// How a policy names the one inline block that it allows.
fn allowed(block: &str) -> String {
    format!("'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(block)))
}
