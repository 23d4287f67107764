//! Test beds of filesystems on several devices.
//!
//! - [`ArrayImages`] is a set of image files. [`crate::LoopMount::array`] mounts them with Linux.
//! - [`judge_array`] lets Linux and both checkers decide about them.
//! - [`FaultyMember`] is a device that dies, hangs, vanishes or loses writes, and may return.
//! - [`crate::RecordingDevice::array`] records all members with one clock, for power cuts. [`crate::ArrayCuts`] and
//!   [`crate::MemberFaults`] are the beds that use them.

mod images;
mod member;

pub use images::{ArrayImages, judge_array};
pub use member::{FaultyMember, HANG, MemberState};
