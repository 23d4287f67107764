//! See `ubtrfs_testkit::hostile::stream`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ubtrfs_testkit::hostile::stream(data));
