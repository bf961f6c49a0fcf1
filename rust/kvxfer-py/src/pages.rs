//! Page lists from what callers have them in.

use crate::errors;
use numpy::{Element, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyRange, PyTuple};
use std::sync::Arc;

/// What an id that is no page's becomes, so that the transfer thread refuses it by name.
pub(crate) const NO_PAGE: u32 = u32::MAX;

/// One page list a group. With one group, the list itself will do.
pub(crate) fn page_lists(obj: &Bound<'_, PyAny>, groups: usize) -> PyResult<Vec<Arc<[u32]>>> {
    if groups == 1 {
        return Ok(vec![match only_item(obj)? {
            Some(item) => page_list(&item)?,
            None => page_list(obj)?,
        }]);
    }
    let lists: Vec<Bound<'_, PyAny>> = if let Ok(list) = obj.cast::<PyList>() {
        list.iter().collect()
    } else if let Ok(tuple) = obj.cast::<PyTuple>() {
        tuple.iter().collect()
    } else {
        return Err(PyTypeError::new_err(format!(
            "pages of {groups} groups are a list of {groups} page lists, not {}",
            obj.get_type().name()?
        )));
    };
    if lists.len() != groups {
        return Err(errors::bad(
            obj.py(),
            format!("{} page lists for {groups} groups: give one a group", lists.len()),
        ));
    }
    lists.iter().map(page_list).collect()
}

/// The list in a list of one list.
fn only_item<'py>(obj: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let item = if let Ok(list) = obj.cast::<PyList>() {
        if list.len() != 1 {
            return Ok(None);
        }
        list.get_item(0)?
    } else if let Ok(tuple) = obj.cast::<PyTuple>() {
        if tuple.len() != 1 {
            return Ok(None);
        }
        tuple.get_item(0)?
    } else {
        return Ok(None);
    };
    // Anything with a length is a list; numpy's integers, which are one page, have none.
    Ok((!item.is_instance_of::<PyInt>() && item.len().is_ok()).then_some(item))
}

fn page_list(obj: &Bound<'_, PyAny>) -> PyResult<Arc<[u32]>> {
    if let Some(pages) = from_array(obj) {
        return pages;
    }
    if let Ok(list) = obj.cast::<PyList>() {
        return collect(list.len(), list.iter());
    }
    if let Ok(tuple) = obj.cast::<PyTuple>() {
        return collect(tuple.len(), tuple.iter());
    }
    if obj.is_instance_of::<PyRange>() {
        return obj.try_iter()?.map(|item| page(&item?)).collect();
    }
    let array = as_array(obj)?;
    from_array(&array).unwrap_or_else(|| Err(PyTypeError::new_err("pages do not convert to int64")))
}

fn collect<'py>(len: usize, items: impl Iterator<Item = Bound<'py, PyAny>>) -> PyResult<Arc<[u32]>> {
    let mut out = Vec::with_capacity(len);
    for item in items {
        out.push(page(&item)?);
    }
    Ok(out.into())
}

#[inline]
fn page(item: &Bound<'_, PyAny>) -> PyResult<u32> {
    match item.extract::<i64>() {
        Ok(id) => Ok(u32::try_from(id).unwrap_or(NO_PAGE)),
        Err(e) if e.is_instance_of::<PyOverflowError>(item.py()) => Ok(NO_PAGE),
        Err(_) => Err(PyTypeError::new_err(format!("a page id is an int, not {}", item.get_type().name()?))),
    }
}

/// The three types that page tables come in, in one pass.
#[inline]
fn from_array(obj: &Bound<'_, PyAny>) -> Option<PyResult<Arc<[u32]>>> {
    copy::<i32>(obj, |id| u32::try_from(id).unwrap_or(NO_PAGE))
        .or_else(|| copy::<i64>(obj, |id| u32::try_from(id).unwrap_or(NO_PAGE)))
        .or_else(|| copy::<u32>(obj, |id| id))
}

#[inline]
fn copy<T: Element + Copy>(obj: &Bound<'_, PyAny>, id: impl Fn(T) -> u32) -> Option<PyResult<Arc<[u32]>>> {
    let array = obj.cast::<PyArray1<T>>().ok()?;
    let Ok(array) = array.try_readonly() else {
        return Some(Err(errors::bad(obj.py(), "the page array is being written by other native code")));
    };
    Some(Ok(match array.as_slice() {
        Ok(ids) => ids.iter().map(|&v| id(v)).collect(),
        Err(_) => array.as_array().iter().map(|&v| id(v)).collect(),
    }))
}

/// Any other one-dimensional array of integers, as int64.
fn as_array<'py>(obj: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = obj.py();
    let wrong = |what: String| {
        PyTypeError::new_err(format!(
            "pages are a list of ints or a 1-D integer array (numpy, torch on the CPU), not {what}"
        ))
    };
    let array = if obj.is_instance_of::<PyUntypedArray>() {
        obj.clone()
    } else if obj.hasattr("data_ptr")? && obj.hasattr("numpy")? {
        obj.call_method0("numpy")?
    } else if obj.hasattr("__array__")? {
        obj.call_method0("__array__")?
    } else {
        return Err(wrong(obj.get_type().name()?.to_string()));
    };
    let untyped = array.cast::<PyUntypedArray>().map_err(|_| wrong("what its __array__ gives".to_owned()))?;
    if untyped.ndim() != 1 {
        return Err(errors::bad(
            py,
            format!(
                "pages are one-dimensional, but this array has shape {:?}; pass one row of a page table",
                untyped.shape()
            ),
        ));
    }
    let dtype = untyped.dtype();
    if !matches!(dtype.kind(), b'i' | b'u') {
        return Err(wrong(format!("an array of {dtype}")));
    }
    array.call_method1("astype", ("int64",))
}
