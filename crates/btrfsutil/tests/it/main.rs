//! Tests of libbtrfsutil against the original library.
//!
//! Method: a C program that was compiled against the original header, and a program of the original Python module, make
//! calls and print each result. They run with the original library on the btrfs of Linux, with ours there, and with ours
//! in our mount of a copy of the same image. The outputs must be equal, line by line.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod compare;
mod library;
