//! See `ubtrfs_fuzz::import`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ubtrfs_fuzz::import(data));
