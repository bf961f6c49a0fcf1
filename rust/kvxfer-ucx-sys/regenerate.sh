#!/bin/sh
# Regenerates src/bindings.rs from the headers of UCX 1.22 (PyPI wheel libucx-cu12 1.22.0).
# Needs bindgen (cargo install bindgen-cli) and libclang; building kvxfer needs neither.
#   regenerate.sh INCLUDE_DIR      e.g. .venv/lib/python3.11/site-packages/libucx/include
set -eu
include=${1:?usage: regenerate.sh INCLUDE_DIR (the folder that holds ucp/api/ucp.h)}
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
header=$(mktemp --suffix=.h)
trap 'rm -f "$header"' EXIT
printf '#include <ucp/api/ucp.h>\n' >"$header"
version=$(sed -n 's/^#define UCP_API_M[AI][JN]OR *\([0-9]*\).*/\1/p' "$include/ucp/api/ucp_version.h" | paste -sd.)

functions='ucp_get_version|ucp_get_version_string|ucp_config_read|ucp_config_modify|ucp_config_release'
functions="$functions|ucp_init_version|ucp_cleanup|ucp_context_query|ucp_context_print_info"
functions="$functions|ucp_worker_create|ucp_worker_destroy|ucp_worker_query|ucp_worker_progress"
functions="$functions|ucp_worker_get_efd|ucp_worker_arm|ucp_worker_get_address|ucp_worker_release_address"
functions="$functions|ucp_worker_set_am_recv_handler|ucp_am_send_nbx"
functions="$functions|ucp_mem_map|ucp_mem_unmap|ucp_mem_query|ucp_rkey_pack|ucp_rkey_buffer_release"
functions="$functions|ucp_ep_rkey_unpack|ucp_rkey_ptr|ucp_rkey_destroy|ucp_ep_create|ucp_ep_close_nbx|ucp_ep_flush_nbx"
functions="$functions|ucp_ep_query|ucp_ep_print_info|ucp_put_nbx|ucp_request_check_status|ucp_request_free"
functions="$functions|ucs_status_string"
types='ucp_feature|ucp_params_field|ucp_context_attr_field|ucp_worker_params_field|ucp_worker_address_flags_t'
types="$types|ucp_mem_map_params_field|ucp_mem_attr_field|ucp_ep_params_field|ucp_ep_attr_field"
types="$types|ucp_ep_close_flags_t|ucp_op_attr_t|ucp_am_handler_param_field|ucp_am_recv_attr_t"
types="$types|ucp_send_am_flags|ucp_am_cb_flags|ucp_wakeup_event_types"
vars='UCP_(MEM_MAP|PARAM|FEATURE|ATTR|WORKER|OP_ATTR|EP|AM|WAKEUP|API|ERR)_.*|UCS_(OK|INPROGRESS|ERR|MEMORY_TYPE|THREAD)_?.*'

{
    printf '//! Bindings of the part of libucp that kvxfer calls, from the headers of UCX %s. Generated once with\n' "$version"
    printf '//! `rust/kvxfer-ucx-sys/regenerate.sh INCLUDE_DIR` and committed; do not edit.\n\n'
    bindgen "$header" --no-layout-tests --no-doc-comments --use-core --merge-extern-blocks \
        --allowlist-function "$functions" --allowlist-type "$types" --allowlist-var "$vars" \
        --blocklist-type '_IO_.*|FILE|sockaddr.*|sa_family_t|size_t|ssize_t' \
        --raw-line 'pub use libc::{FILE, sockaddr, sockaddr_storage, socklen_t};' \
        --blocklist-type 'socklen_t|__socklen_t' \
        --dynamic-loading Api --wrap-unsafe-ops \
        --default-enum-style consts --no-prepend-enum-name \
        --rust-target 1.88 --rust-edition 2024 --formatter prettyplease \
        -- -I"$include"
} >"$here/src/bindings.rs"
