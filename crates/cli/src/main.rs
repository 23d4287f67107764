//! The ubtrfs command line.
fn main() {}
