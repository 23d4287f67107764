//! The lowest folder: what every change needs before it touches an inode. No file here knows an inode's content.
//!
//! - `context`: is the filesystem writable, admitting a change, reserving metadata.
//! - `change_gate`: admits changes, and waits for running changes when it closes.
//! - `commit_requests`: requests to the commit thread.

pub(crate) mod change_gate;
pub(crate) mod commit_requests;
pub(crate) mod context;
