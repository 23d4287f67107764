//! See `ubtrfs_testkit::hostile::tree_log`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ubtrfs_testkit::hostile::tree_log(data));
