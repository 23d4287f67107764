//! Test support for the other crates: the kernel oracle, the reference model, and devices that fail or lose power.
//!
//! Other crates use this crate only as a dev-dependency.
//!
//! Programs outside of ubtrfs decide whether ubtrfs is right:
//! - [`LoopMount`] mounts an image with Linux, [`btrfs_check`] and [`LoopMount::scrub`] verify it with btrfs-progs and
//!   Linux, [`compare_trees`] compares two trees file by file.
//! - [`KernelImage`] is a filesystem with rich content that Linux made, in one of the formats that `mkfs.btrfs` offers.
//! - [`Model`] is a filesystem in memory. [`Driver`] performs random operations on the model and on a [`Target`].
//! - [`differential`] performs random system calls by several users on our mount and on Linux's, and compares each
//!   answer.
//! - [`SnapshotChain`] is a chain of snapshots that Linux makes and sends.
//! - [`RecordingDevice`] records writes and flushes, to replay power cuts; [`FaultDevice`] fails the n-th I/O.
//!
//! I1. All randomness comes from a seed that is printed when a test fails.
//! I2. A test that needs root, loop devices or FUSE calls [`capability`] first. If a capability is missing, the test
//!     prints a line that it is skipped; with `CI=true`, the test fails.
//! I3. Mounts, loop devices and files are released on drop, also after a panic.

#![forbid(unsafe_code)]

pub mod array;
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
mod receive_round;
mod recording_device;
mod rng;
mod scale;
mod script;
pub mod send;
mod snapshot_chain;
mod target;
mod threads;
mod tree_entry;
mod unflushed;

use check::opinion_without_quotas;
pub use check::{
    QuotaNumbers, btrfs_check, btrfs_check_after_failures, btrfs_check_array, btrfs_check_output, check_quotas,
    quota_report, second_opinion, ubtrfs_check_errors,
};
pub use command::{build_example, exported_functions, run, run_with_input};
pub use corruptor::{Corruption, Corruptor, Damage};
pub use driver::{Driver, DriverReport};
pub use fault_device::{FaultDevice, FaultKind, FaultPlan};
pub use faults::{FaultOutcome, FaultRun, FaultSweep, Start, silence_planned_panics};
pub use fs_target::{FsTarget, errno, walk_fs, walk_fs_from};
pub use history::{History, Promise, ReadFound};
pub use hook_device::HookDevice;
pub use image::Image;
pub use judge::judge;
pub use kernel_image::{KernelImage, KernelImageSpec, RichTree};
pub use loop_mount::{LoopArray, LoopDevice, LoopMount};
pub use medium::{Medium, MediumDevice};
pub use model::{CAPABILITY, Model, ModelError};
pub use names::{colliding_names, name_of_len};
pub use path_target::PathTarget;
pub use power_cuts::{Cut, LinuxVerdict, PowerCuts, check as check_medium};
pub use raw_blocks::RawBlock;
pub use receive_round::receive_round;
pub use recording_device::{CutBuilder, CutOutcome, Gate, LANES, RecordingDevice};
pub use rng::Rng;
pub use scale::{Cost, Dimension, exponent};
pub use script::{Script, Step};
pub use snapshot_chain::{SendOptions, Sharing, SnapshotChain, receive_by_linux};
pub use target::{Errno, FallocateOp, NodeKind, RenameOp, Target};
pub use threads::{ArrayCut, ArrayCuts, Fate, MemberFaults, ThreadedCuts, ThreadedFaults, random_balance};
pub use tree_entry::{Compare, TreeEntry, compare_entries, compare_trees, tree_digest, walk_path};
