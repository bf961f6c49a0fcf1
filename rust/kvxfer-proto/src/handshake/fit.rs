//! Whether two authenticated peers can work together.

use crate::layout::Side;
use crate::msg::{Describe, Role};
use crate::plan;
use std::fmt;

/// Checks that `src` (the acceptor, which pushes) can deliver into `dst` (the initiator, which grants). Both sides
/// call this with the same arguments and come to the same text.
///
/// # Errors
/// The field that clashes and both its values.
pub fn fit(src: &Describe, dst: &Describe) -> Result<(), String> {
    let (source, destination) = (Name("prefill side", &src.name), Name("decode side", &dst.name));
    if src.role == Role::Decode || dst.role == Role::Prefill {
        return Err(format!(
            "role differs from what a transfer needs: {source} has role {}, {destination} has role {}; the side that \
             is connected to must be prefill or both, the side that connects decode or both",
            role(src.role),
            role(dst.role)
        ));
    }
    if src.mode != dst.mode {
        return Err(format!(
            "mode differs: {source} has {}, {destination} has {}",
            Clip(&src.mode),
            Clip(&dst.mode)
        ));
    }
    // An engine that gives no fingerprint takes the risk itself.
    if src.model != dst.model && !src.model.is_empty() && !dst.model.is_empty() {
        return Err(format!(
            "model fingerprint differs: {source} has {}, {destination} has {}",
            Clip(&src.model),
            Clip(&dst.model)
        ));
    }
    let (src_side, dst_side) = (side(src), side(dst));
    own(&source, src, &src_side)?;
    own(&destination, dst, &dst_side)?;
    plan::compatible(&src_side, &dst_side)
        .map_err(|mismatch| format!("{mismatch} (source is {source}, destination is {destination})"))
}

fn side(d: &Describe) -> Side {
    Side { groups: d.groups.clone(), shard: d.shard }
}

/// One side's own layout against its own region table.
fn own(who: &Name<'_>, d: &Describe, side: &Side) -> Result<(), String> {
    side.validate().map_err(|e| format!("layout of {who}: {e}"))?;
    if d.pages.len() != d.groups.len() {
        return Err(format!("pages of {who}: {} counts for {} groups", d.pages.len(), d.groups.len()));
    }
    // Before `regions` makes a table: its size is bounded by the one that was sent.
    let count = side.region_count();
    if usize::try_from(count).ok() != Some(d.regions.len()) {
        return Err(format!("regions of {who}: {} sent, its layout and shard have {count}", d.regions.len()));
    }
    let expected = side.regions(&d.pages).map_err(|e| format!("regions of {who}: {e}"))?;
    for (i, (got, want)) in d.regions.iter().zip(&expected).enumerate() {
        if (got.group, got.layer, got.part) != (want.group, want.layer, want.part) {
            return Err(format!(
                "region {i} of {who}: is group {}, layer {}, part {}; its layout has group {}, layer {}, part {} there",
                got.group, got.layer, got.part, want.group, want.layer, want.part
            ));
        }
        if got.len < want.len {
            return Err(format!(
                "region {i} of {who} (group {}, layer {}, part {}): {} bytes, its pages take {}",
                got.group, got.layer, got.part, got.len, want.len
            ));
        }
    }
    Ok(())
}

const fn role(role: Role) -> &'static str {
    match role {
        Role::Both => "both",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    }
}

struct Name<'a>(&'static str, &'a str);

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0, Clip(self.1))
    }
}

/// A peer's string in quotes, with control characters escaped, and short enough that the rest of the text keeps
/// its place.
struct Clip<'a>(&'a str);

impl fmt::Display for Clip<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 64;
        let mut chars = self.0.chars();
        let head: String = chars.by_ref().take(MOST).collect();
        let dots = if chars.next().is_some() { "..." } else { "" };
        write!(f, "{head:?}{dots}")
    }
}
