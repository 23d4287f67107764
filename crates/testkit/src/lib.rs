//! What the other crates' tests stand on: the kernel oracle, the reference model, and devices that fail or lose power.
//!
//! Top of the house, for tests only: no shipped crate depends on it except as a dev-dependency.
//!
//! What decides whether ubtrfs is right is not ubtrfs:
//! - [`LoopMount`] has Linux mount an image, [`btrfs_check`] and [`LoopMount::scrub`] have btrfs-progs and Linux verify
//!   it, [`compare_trees`] compares two trees file by file.
//! - [`KernelImage`] is a rich filesystem that Linux made, with many `mkfs.btrfs` options.
//! - [`Model`] is a filesystem in memory; [`Driver`] performs the same random operations on it and on a [`Target`].
//! - [`differential`] performs random system calls by several users on our mount and on Linux's, answer against answer.
//! - [`RecordingDevice`] keeps what was written between flushes, to replay power cuts; [`FaultDevice`] fails the n-th I/O.
//!
//! I1. Whatever is random comes from a seed that is printed when a test fails.
//! I2. A test that needs root, loop devices or FUSE calls [`capability`] first: without them it skips with one loud line,
//!     and with `CI=true` it fails.
//! I3. Mounts, loop devices and files are given back on drop, panics included.

#![forbid(unsafe_code)]

pub mod capability;
mod check;
mod command;
mod corruptor;
pub mod crafted;
pub mod differential;
mod driver;
mod fault_device;
mod faults;
mod fs_target;
mod history;
mod hook_device;
pub mod hostile;
mod image;
mod judge;
mod kernel_image;
mod loop_mount;
mod medium;
mod model;
mod names;
mod path_target;
mod power_cuts;
mod prefixed;
mod promising;
mod raw_blocks;
mod recording_device;
mod rng;
mod script;
mod target;
mod threads;
mod tree_entry;

pub use check::{btrfs_check, btrfs_check_after_failures, btrfs_check_output, second_opinion};
pub use command::{run, run_with_input};
pub use corruptor::{Corruption, Corruptor, Damage};
pub use driver::{Driver, DriverReport};
pub use fault_device::{FaultDevice, FaultKind, FaultPlan};
pub use faults::{FaultOutcome, FaultRun, FaultSweep, Start, hush_planned_panics};
pub use fs_target::{FsTarget, walk_fs};
pub use history::{History, Promise, ReadFound};
pub use hook_device::HookDevice;
pub use image::Image;
pub use judge::judge;
pub use kernel_image::{KernelImage, KernelImageSpec, RichTree};
pub use loop_mount::LoopMount;
pub use medium::{Medium, MediumDevice};
pub use model::{Model, ModelError};
pub use names::{colliding_names, name_of_len};
pub use path_target::PathTarget;
pub use power_cuts::{Cut, PowerCuts, check as check_medium};
pub use raw_blocks::RawBlock;
pub use recording_device::{CutBuilder, CutOutcome, Gate, LANES, RecordingDevice};
pub use rng::Rng;
pub use script::{Script, Step};
pub use target::{Errno, FallocateOp, NodeKind, RenameOp, Target};
pub use threads::{ThreadedCuts, ThreadedFaults};
pub use tree_entry::{Compare, TreeEntry, compare_entries, compare_trees, tree_digest, walk_path};
