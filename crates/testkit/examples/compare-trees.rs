//! Compares two directory trees: all attributes that a copy keeps. Prints the differences, and exits with status 1 if
//! the trees differ.
//!
//! Usage: `compare-trees EXPECTED FOUND`

#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

use ubtrfs_testkit::{Compare, compare_trees};

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let [expected, found] = args.as_slice() else {
        eprintln!("usage: compare-trees EXPECTED FOUND");
        return ExitCode::FAILURE;
    };
    match compare_trees(Path::new(expected), Path::new(found), Compare::COPY) {
        Ok(entries) => {
            println!("{entries} entries are equal");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
