//! See `ubtrfs_testkit::hostile::superblock`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ubtrfs_testkit::hostile::superblock(data));
