//! The differential test bed: makes random system calls as several users on our FUSE mount and on Linux's btrfs, and
//! compares the answers.
//!
//! A [`Pair`] holds two equal filesystems, one mounted by `ubtrfs`, one by Linux. A [`Generator`] chooses [`Step`]s
//! from a seed. [`run`] performs each step on both sides as the same user, and compares the result, the returned data,
//! and the attributes of all objects that the call names. Whole trees of both sides are compared at random steps and
//! before each remount. After a remount, the tree of each image is compared with the tree that it had before, including
//! all times, also after [`Call::Swap`], in which the sides exchange their images. At the end, `btrfs check` and our
//! checker must find both images clean, and Linux's scrub must find no errors.
//!
//! - D1. A difference is accepted only if [`allowed`] lists it and `docs/conformance.md` gives the reason. Any other
//!   difference is a failure.
//! - D2. A sequence is a list of steps, and performing it makes no random choices, so a list repeats exactly.
//!   [`shrink`] removes steps from a failing list as long as the same difference remains.
//! - D3. Users are threads with different credentials, which Linux keeps per thread. So both sides see one process in
//!   which several users act, and one user can use descriptors that another user opened.

mod actor;
mod allowed;
mod bed;
mod call;
mod generate;
mod helper;
mod observe;
mod pair;
mod perform;
mod shrink;
mod together;

pub use actor::{ACTORS, Actor};
pub use allowed::{ALLOWED, Allowed, KNOWN};
pub use bed::{Difference, Failure, Options, Outcome, Source, run, run_rounds};
pub use call::{Call, Content, Kind, Seek, Step, Time};
pub use generate::Generator;
pub use pair::{Pair, Setup};
pub use shrink::shrink;
