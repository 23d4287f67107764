//! The differential bed: random system calls by several users on our FUSE mount and on Linux's btrfs, answer against answer.
//!
//! A [`Pair`] holds two equal filesystems, one mounted by `ubtrfs`, one by Linux. A [`Generator`] chooses [`Step`]s from a
//! seed; [`run`] performs each on both sides as the same user and compares the result, the returned data and the
//! attributes of all that the call named. Whole trees are compared now and then, before and after remounts (then with all
//! times, each side against itself), and after [`Call::Swap`], which has each side go on with the other's image. At the end
//! `btrfs check` and our checker must find both images clean, and Linux's scrub the data.
//!
//! - D1. A difference passes only if [`allowed`] names it, and `docs/conformance.md` says why. Anything else fails.
//! - D2. A sequence is a list of steps: the same list gives the same calls, whatever was chosen at random to make it.
//!   [`shrink`] removes steps from a failing list as long as the same difference remains.
//! - D3. Users are threads with credentials of their own (on Linux these belong to threads), so both sides see one process
//!   in which several users act, and descriptors that one user opened and another uses.

mod actor;
mod allowed;
mod bed;
mod call;
mod generate;
mod observe;
mod pair;
mod perform;
mod shrink;

pub use actor::{ACTORS, Actor};
pub use allowed::{ALLOWED, Allowed, KNOWN};
pub use bed::{Difference, Failure, Options, Outcome, Source, hunt, run};
pub use call::{Call, Content, Kind, Seek, Step, Time};
pub use generate::Generator;
pub use pair::{Pair, Setup};
pub use shrink::shrink;
