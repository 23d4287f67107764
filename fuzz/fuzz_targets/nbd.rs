//! See `ubtrfs_testkit::hostile::nbd`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ubtrfs_testkit::hostile::nbd(data));
