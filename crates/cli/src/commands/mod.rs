//! The commands. Most modules have `Args` (clap) and a function `run`, which returns the exit status. `committed`, `place`,
//! `served` and some modules of `offline` are shared by several commands.

pub(crate) mod background;
pub(crate) mod balance;
pub(crate) mod check;
pub(crate) mod committed;
pub(crate) mod device;
pub(crate) mod filesystem;
pub(crate) mod inspect;
pub(crate) mod mkfs;
pub(crate) mod mount;
#[cfg(feature = "remote")]
pub(crate) mod object;
pub(crate) mod offline;
pub(crate) mod place;
pub(crate) mod property;
pub(crate) mod qgroup;
pub(crate) mod quota;
pub(crate) mod receive;
#[cfg(feature = "remote")]
pub(crate) mod remote;
pub(crate) mod replace;
pub(crate) mod rescue;
pub(crate) mod script;
pub(crate) mod scrub;
pub(crate) mod send;
pub(crate) mod served;
mod servers_of;
pub(crate) mod stats;
pub(crate) mod subvolume;
pub(crate) mod sync;
pub(crate) mod top;
pub(crate) mod tune;
pub(crate) mod umount;
