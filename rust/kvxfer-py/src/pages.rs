//! Page lists from what callers have them in.

use crate::errors;
use numpy::{Element, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyRange, PyTuple};
use std::sync::Arc;

/// Stands for an id that no `u32` holds. It is no page either: a group has fewer.
const NO_PAGE: u32 = u32::MAX;

/// Page lists, and what they had to leave out.
#[derive(Debug)]
pub(crate) struct PageLists {
    /// One a group.
    pub(crate) lists: Vec<Arc<[u32]>>,
    /// The first id that is negative or past 32 bits, and its group: the transfer thread refuses it by its value.
    /// An id past 64 bits is given as the nearest `i64`.
    pub(crate) odd_page: Option<(usize, i64)>,
}

/// One page list a group. With one group, the list itself will do.
pub(crate) fn page_lists(obj: &Bound<'_, PyAny>, groups: usize) -> PyResult<PageLists> {
    if groups == 1 {
        let mut odd = None;
        let list = match only_item(obj)? {
            Some(item) => page_list(&item, &mut odd)?,
            None => page_list(obj, &mut odd)?,
        };
        return Ok(PageLists { lists: vec![list], odd_page: odd.map(|id| (0, id)) });
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
    let mut out = PageLists { lists: Vec::with_capacity(groups), odd_page: None };
    for (group, list) in lists.iter().enumerate() {
        let mut odd = None;
        out.lists.push(page_list(list, &mut odd)?);
        out.odd_page = out.odd_page.or(odd.map(|id| (group, id)));
    }
    Ok(out)
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

fn page_list(obj: &Bound<'_, PyAny>, odd: &mut Option<i64>) -> PyResult<Arc<[u32]>> {
    if let Some(pages) = from_array(obj, odd) {
        return pages;
    }
    if let Ok(list) = obj.cast::<PyList>() {
        return collect(list.len(), list.iter(), odd);
    }
    if let Ok(tuple) = obj.cast::<PyTuple>() {
        return collect(tuple.len(), tuple.iter(), odd);
    }
    if obj.is_instance_of::<PyRange>() {
        return obj.try_iter()?.map(|item| page(&item?, odd)).collect();
    }
    let array = as_array(obj)?;
    from_array(&array, odd)
        .or_else(|| copy::<u64>(&array, odd, |id| i64::try_from(id).unwrap_or(i64::MAX)))
        .unwrap_or_else(|| Err(PyTypeError::new_err("pages do not convert to 64-bit integers")))
}

fn collect<'py>(
    len: usize,
    items: impl Iterator<Item = Bound<'py, PyAny>>,
    odd: &mut Option<i64>,
) -> PyResult<Arc<[u32]>> {
    let mut out = Vec::with_capacity(len);
    for item in items {
        out.push(page(&item, odd)?);
    }
    Ok(out.into())
}

#[inline]
fn page(item: &Bound<'_, PyAny>, odd: &mut Option<i64>) -> PyResult<u32> {
    match item.extract::<i64>() {
        Ok(id) => Ok(narrow(id, odd)),
        Err(e) if e.is_instance_of::<PyOverflowError>(item.py()) => {
            Ok(narrow(if item.lt(0)? { i64::MIN } else { i64::MAX }, odd))
        }
        Err(_) => Err(PyTypeError::new_err(format!("a page id is an int, not {}", item.get_type().name()?))),
    }
}

#[inline]
fn narrow(id: i64, odd: &mut Option<i64>) -> u32 {
    u32::try_from(id).unwrap_or_else(|_| {
        odd.get_or_insert(id);
        NO_PAGE
    })
}

/// The three types that page tables come in, in one pass.
#[inline]
fn from_array(obj: &Bound<'_, PyAny>, odd: &mut Option<i64>) -> Option<PyResult<Arc<[u32]>>> {
    copy::<i32>(obj, odd, i64::from)
        .or_else(|| copy::<i64>(obj, odd, |id| id))
        .or_else(|| copy::<u32>(obj, odd, i64::from))
}

#[inline]
fn copy<T: Element + Copy>(
    obj: &Bound<'_, PyAny>,
    odd: &mut Option<i64>,
    wide: impl Fn(T) -> i64,
) -> Option<PyResult<Arc<[u32]>>> {
    let array = obj.cast::<PyArray1<T>>().ok()?;
    let Ok(array) = array.try_readonly() else {
        return Some(Err(errors::bad(obj.py(), "the page array is being written by other native code")));
    };
    Some(Ok(match array.as_slice() {
        Ok(ids) => ids.iter().map(|&v| narrow(wide(v), odd)).collect(),
        Err(_) => array.as_array().iter().map(|&v| narrow(wide(v), odd)).collect(),
    }))
}

/// Any other one-dimensional array of integers, as int64 or uint64.
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
    let wide = match dtype.kind() {
        b'i' => "int64",
        b'u' => "uint64",
        _ => return Err(wrong(format!("an array of {dtype}"))),
    };
    array.call_method1("astype", (wide,))
}
