//! See `ubtrfs_testkit::hostile::receive`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ubtrfs_testkit::hostile::receive(data));
