//! See `ubtrfs_fuzz::walk`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ubtrfs_fuzz::walk(data));
