//! `kvxfer._kvxfer._bench_copy`: the limit that transfers are measured against.

use crate::errors;
use numpy::{PyArray1, PyArrayMethods as _, PyReadonlyArray1, PyReadwriteArray1};
use pyo3::prelude::*;
use std::time::Instant;

/// One piece within a region: where it goes, where it comes from, and how long it is.
type Place = (std::ops::Range<usize>, std::ops::Range<usize>);

/// A region to copy into, and one to copy from.
type Pair<'a, 'py> = (Bound<'py, PyArray1<u8>>, Bound<'a, PyArray1<u8>>);

fn places(dst: &[u64], src: &[u64], lens: &[u64]) -> Option<Vec<Place>> {
    let range = |at: u64, len: u64| {
        let (at, len) = (usize::try_from(at).ok()?, usize::try_from(len).ok()?);
        Some(at..at.checked_add(len)?)
    };
    if dst.len() != src.len() || dst.len() != lens.len() {
        return None;
    }
    dst.iter().zip(src).zip(lens).map(|((d, s), n)| Some((range(*d, *n)?, range(*s, *n)?))).collect()
}

/// Copies the same pieces in each pair of regions, one after the other, by plain `memcpy` in one thread; returns the
/// nanoseconds that it took, without the checks that come first.
///
/// `regions` are pairs (to, from) of uint8 arrays; `dst`, `src` and `lens` are uint64 arrays of byte offsets and byte
/// counts. Raises `BadArgument` if a piece leaves its region.
#[pyfunction]
#[pyo3(signature = (regions, *, dst, src, lens))]
#[expect(clippy::needless_pass_by_value, reason = "they are extracted from Python's arguments")]
pub(crate) fn _bench_copy(
    py: Python<'_>,
    regions: Vec<Pair<'_, '_>>,
    dst: PyReadonlyArray1<'_, u64>,
    src: PyReadonlyArray1<'_, u64>,
    lens: PyReadonlyArray1<'_, u64>,
) -> PyResult<u64> {
    let bad = || errors::bad(py, "dst, src and lens are contiguous uint64 arrays of one length");
    let (Ok(d), Ok(s), Ok(n)) = (dst.as_slice(), src.as_slice(), lens.as_slice()) else {
        return Err(bad());
    };
    let places = places(d, s, n).ok_or_else(bad)?;
    let busy =
        |_| errors::bad(py, "the regions are contiguous, writable where they are copied to, and apart");
    let mut to: Vec<PyReadwriteArray1<'_, u8>> =
        regions.iter().map(|pair| pair.0.try_readwrite()).collect::<Result<_, _>>().map_err(busy)?;
    let from: Vec<PyReadonlyArray1<'_, u8>> =
        regions.iter().map(|pair| pair.1.try_readonly()).collect::<Result<_, _>>().map_err(busy)?;
    let mut pairs = Vec::with_capacity(regions.len());
    for (to, from) in to.iter_mut().zip(&from) {
        let (Ok(to), Ok(from)) = (to.as_slice_mut(), from.as_slice()) else {
            return Err(errors::bad(py, "the regions are contiguous"));
        };
        if places.iter().any(|(d, s)| d.end > to.len() || s.end > from.len()) {
            return Err(errors::bad(py, "a piece leaves its region"));
        }
        pairs.push((to, from));
    }
    let took = py.detach(move || {
        let start = Instant::now();
        for (to, from) in pairs {
            for (d, s) in &places {
                if let (Some(to), Some(from)) = (to.get_mut(d.clone()), from.get(s.clone())) {
                    to.copy_from_slice(from);
                }
            }
        }
        start.elapsed()
    });
    Ok(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX))
}
