//! What `ucs/type/status.h` does with macros and inline functions: a pointer that UCX returns is null (done), a
//! request, or a small negative status dressed up as a pointer.

use crate::bindings::{UCS_ERR_LAST, UCS_OK, ucs_status_ptr_t, ucs_status_t};

/// `UCS_PTR_IS_ERR`: whether the pointer is a status, not a request.
#[must_use]
pub fn ptr_is_err(ptr: ucs_status_ptr_t) -> bool {
    // The casts are the macro's: an address as an unsigned number against `(uintptr_t)UCS_ERR_LAST`.
    ptr.addr() >= isize::from(UCS_ERR_LAST).cast_unsigned()
}

/// `UCS_PTR_IS_PTR`: whether the pointer is a request.
#[must_use]
pub fn ptr_is_ptr(ptr: ucs_status_ptr_t) -> bool {
    !ptr.is_null() && !ptr_is_err(ptr)
}

/// `UCS_PTR_RAW_STATUS` where [`ptr_is_err`] holds, `UCS_OK` for null, `None` for a request.
#[must_use]
pub fn ptr_status(ptr: ucs_status_ptr_t) -> Option<ucs_status_t> {
    if ptr.is_null() {
        return Some(UCS_OK);
    }
    if !ptr_is_err(ptr) {
        return None;
    }
    // An error pointer's address is a sign-extended status between UCS_ERR_LAST and -1, so it fits.
    ucs_status_t::try_from(ptr.addr().cast_signed()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bindings::{UCS_ERR_BUSY, UCS_ERR_CANCELED, UCS_ERR_CONNECTION_RESET, UCS_ERR_NO_MESSAGE};
    use core::ptr;

    fn as_ptr(status: ucs_status_t) -> ucs_status_ptr_t {
        // UCS_STATUS_PTR: (void*)(intptr_t)(status)
        ptr::without_provenance_mut(isize::from(status).cast_unsigned())
    }

    #[test]
    fn statuses_come_back_from_pointers() {
        for status in
            [UCS_ERR_NO_MESSAGE, UCS_ERR_BUSY, UCS_ERR_CANCELED, UCS_ERR_CONNECTION_RESET, UCS_ERR_LAST]
        {
            let ptr = as_ptr(status);
            assert!(ptr_is_err(ptr), "{status}");
            assert!(!ptr_is_ptr(ptr), "{status}");
            assert_eq!(ptr_status(ptr), Some(status));
        }
    }

    #[test]
    fn null_is_success() {
        assert!(!ptr_is_err(ptr::null_mut()));
        assert!(!ptr_is_ptr(ptr::null_mut()));
        assert_eq!(ptr_status(ptr::null_mut()), Some(UCS_OK));
    }

    #[test]
    fn requests_are_neither() {
        let mut word = 0u64;
        let below_errors = as_ptr(UCS_ERR_LAST - 1);
        for ptr in [ptr::from_mut(&mut word).cast(), below_errors, ptr::without_provenance_mut(1 << 63)] {
            assert!(ptr_is_ptr(ptr));
            assert_eq!(ptr_status(ptr), None);
        }
    }
}
