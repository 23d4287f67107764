//! The functions, structs and constants of the header `ubtrfs.h`. They only convert; crate `ubtrfs` does the work.
//!
//! A file is a section of the header: its first line is the title, and comments of items are comments in C.

pub mod archive;
pub mod attributes;
pub mod balance;
pub mod check;
pub mod device;
pub mod directory;
pub mod error;
pub mod extents;
pub mod file;
pub mod filesystem;
pub mod job;
pub mod members;
pub mod names;
pub mod quota;
pub mod scrub;
pub mod space;
pub mod stream;
pub mod subvolume;
