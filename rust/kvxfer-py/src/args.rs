//! Arguments with checks of their own.

use crate::errors;
use kvxfer_proto::Room;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyRange, PyRangeMethods, PyTuple};
use std::time::Duration;

/// What a u64 out of range becomes.
fn number(obj: Borrowed<'_, '_, PyAny>, error: impl FnOnce() -> String) -> PyResult<u64> {
    let py = obj.py();
    obj.extract::<u64>()
        .map_err(|e| if e.is_instance_of::<PyOverflowError>(py) { errors::bad(py, error()) } else { e })
}

/// A room's number.
#[derive(Clone, Copy)]
pub(crate) struct RoomArg(pub(crate) u64);

impl<'py> FromPyObject<'_, 'py> for RoomArg {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let text =
            || format!("room {} is out of range: a room has 63 bits, 0 to {}", obj.to_owned(), Room::MAX);
        let room = number(obj, text)?;
        if room > Room::MAX { Err(errors::bad(obj.py(), text())) } else { Ok(Self(room)) }
    }
}

/// A number of tokens or a token's place.
#[derive(Clone, Copy)]
pub(crate) struct Count(pub(crate) u64);

impl<'py> FromPyObject<'_, 'py> for Count {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        number(obj, || format!("a number of tokens is 0 or more and fits in 64 bits, not {}", obj.to_owned()))
            .map(Self)
    }
}

/// A whole number that is not negative and fits its type.
#[derive(Clone, Copy)]
pub(crate) struct Int<T>(pub(crate) T);

impl<'py, T: TryFrom<u64>> FromPyObject<'_, 'py> for Int<T> {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let max = u64::MAX >> (64 - 8 * size_of::<T>().clamp(1, 8));
        let text = || format!("{} is out of range: 0 to {max}", obj.to_owned());
        T::try_from(number(obj, text)?).map(Self).map_err(|_| errors::bad(obj.py(), text()))
    }
}

/// Seconds, or no limit of the caller's own.
#[derive(Clone, Copy)]
pub(crate) struct Seconds(pub(crate) Duration);

impl<'py> FromPyObject<'_, 'py> for Seconds {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let seconds = obj.extract::<f64>()?;
        if seconds.is_nan() || seconds < 0.0 {
            let text = format!("a time is a number of seconds, 0 or more, not {seconds}");
            return Err(errors::bad(obj.py(), text));
        }
        // A thousand years are as good as for ever, and infinity is one of them.
        Ok(Self(Duration::try_from_secs_f64(seconds.min(3e10)).unwrap_or(Duration::MAX)))
    }
}

/// Layers `first..end`.
#[derive(Clone, Copy)]
pub(crate) struct Layers(pub(crate) u32, pub(crate) u32);

impl<'py> FromPyObject<'_, 'py> for Layers {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = obj.py();
        let (first, end) = if let Ok(range) = obj.cast::<PyRange>() {
            if range.step()? != 1 {
                return Err(errors::bad(py, format!("layers {} must have step 1", obj.to_owned())));
            }
            (i64::try_from(range.start()?)?, i64::try_from(range.stop()?)?)
        } else if obj.is_instance_of::<PyTuple>() {
            obj.extract::<(i64, i64)>()?
        } else {
            return Err(PyTypeError::new_err("layers is a range or a pair (first, end), or None for all"));
        };
        match (u32::try_from(first), u32::try_from(end)) {
            (Ok(first), Ok(end)) if first < end => Ok(Self(first, end)),
            _ => Err(errors::bad(
                py,
                format!("layers {first} to {end} (without {end}) are none: give first < end, both 0 or more"),
            )),
        }
    }
}
