//! `ubtrfs tune`, by the name `btrfstune` too: changes of an unmounted filesystem that only its superblocks record, and of
//! its id in all tree blocks.
//! Options are named as in btrfs-progs.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use ubtrfs_device::{Access, Device, is_seed};
use ubtrfs_format::item::DevReplaceItem;
use ubtrfs_format::superblock::Incompat;
use ubtrfs_fs::{Fs, MountOptions, rewrite_id};
use ubtrfs_volumes::{Tuning, tune, unfinished_replacement};
use uuid::Uuid;

use super::device::superblock_of;
use super::offline::{open_device, with_members};
use crate::common::{Shown, is_confirmed, print_out, warn};
use crate::job::with_progress_in_bytes;
use crate::progs::is_progs;

/// Change the UUID, the seeding flag or features of an unmounted filesystem
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image file or block device; the other devices of the filesystem are found, or are given too
    #[arg(value_name = "DEVICE", required = true)]
    devices: Vec<PathBuf>,
    /// Change the UUID of the filesystem to a random one, only in the superblocks (feature metadata_uuid, Linux 5.0)
    #[arg(short = 'm')]
    random: bool,
    /// Change the UUID of the filesystem to this one, only in the superblocks
    #[arg(short = 'M', value_name = "UUID", conflicts_with = "random")]
    metadata_uuid: Option<String>,
    /// Make the filesystem a seed, which is never written and on which others are made (1), or end that (0)
    #[arg(short = 'S', value_name = "0|1", conflicts_with_all = ["random", "metadata_uuid"])]
    seeding: Option<String>,
    /// Allow more hard links of a file in one directory (feature extref)
    #[arg(short = 'r')]
    extref: bool,
    /// Allow smaller items for metadata extents (feature skinny-metadata)
    #[arg(short = 'x')]
    skinny: bool,
    /// Store no items for holes of files (feature no-holes)
    #[arg(short = 'n')]
    no_holes: bool,
    /// Change the UUID of the filesystem to a random one in all blocks, or go on with such a change that was interrupted
    #[arg(short = 'u', conflicts_with_all = OTHERS)]
    rewrite: bool,
    /// Change the UUID of the filesystem to this one in all blocks
    #[arg(short = 'U', value_name = "UUID", conflicts_with_all = OTHERS)]
    rewrite_to: Option<String>,
    /// Do not ask before a dangerous change
    #[arg(short = 'f')]
    force: bool,
}

/// Opens all devices of the filesystem, those of a seed on which it builds only for reading: others may use them.
/// With `all_named`, no device is searched for: beside a copy of a device, the search finds the devices of the original.
fn opened(given: &[PathBuf], all_named: bool) -> anyhow::Result<Vec<Arc<dyn Device>>> {
    let mut own = None;
    let mut devices: Vec<Arc<dyn Device>> = Vec::new();
    let paths = with_members(given)?;
    let unnamed = paths.iter().skip(given.len()).find(|path| !is_seed(path));
    if let Some(other) = unnamed.filter(|_| all_named) {
        bail!(
            "{} belongs to the filesystem too, or to one of which {} is a copy; name all devices whose UUID is to change",
            other.shown(),
            given.first().map(|path| path.shown()).unwrap_or_default()
        );
    }
    for path in paths {
        let fsid = superblock_of(&path)?.fsid;
        let is_of_seed = is_seed(&path) && *own.get_or_insert(fsid) != fsid;
        let access = if is_of_seed { Access::ReadOnly } else { Access::ReadWrite };
        devices.push(Arc::new(open_device(&path, access)?));
    }
    Ok(devices)
}

/// The options that do not stand beside a change of all blocks.
const OTHERS: [&str; 6] = ["random", "metadata_uuid", "seeding", "extref", "skinny", "no_holes"];

/// A UUID that the user gave.
fn given(text: &String) -> anyhow::Result<Uuid> {
    let uuid = Uuid::parse_str(text).with_context(|| format!("could not parse UUID: {}", text.shown()))?;
    match uuid.is_nil() {
        true => bail!("the UUID of a filesystem cannot be zero; give another one"),
        false => Ok(uuid),
    }
}

impl Args {
    fn tuning(&self) -> anyhow::Result<Tuning> {
        let features = [
            (self.extref, Incompat::EXTENDED_IREF),
            (self.skinny, Incompat::SKINNY_METADATA),
            (self.no_holes, Incompat::NO_HOLES),
        ];
        let seeding = match self.seeding.as_deref() {
            None => None,
            Some("1") => Some(true),
            Some("0") => Some(false),
            Some(other) => bail!("-S {}: give 1 to set the seeding flag, or 0 to clear it", other.shown()),
        };
        Ok(Tuning {
            fsid: match self.random {
                true => Some(Uuid::new_v4()),
                false => self.metadata_uuid.as_ref().map(given).transpose()?,
            },
            seeding,
            features: features
                .into_iter()
                .filter(|(wanted, _)| *wanted)
                .fold(Incompat::empty(), |all, (_, one)| all | one),
        })
    }
}

/// Fails if a device is being replaced, also if the new device was not given. A filesystem that cannot be read, for example
/// because a change of its UUID was interrupted, is not refused.
fn refuse_replacement(devices: &[Arc<dyn Device>]) -> anyhow::Result<()> {
    let Ok(fs) = Fs::open(devices.to_vec(), MountOptions { read_only: true, ..MountOptions::default() }) else {
        return Ok(());
    };
    let last = fs.last_replacement();
    fs.close()?;
    match last.ok().flatten().filter(DevReplaceItem::is_unfinished) {
        Some(item) => Err(unfinished_replacement(Some(item.src_devid)).into()),
        None => Ok(()),
    }
}

const REWRITE_WARNING: &str = "it's recommended to run 'btrfs check --readonly' before this operation.\n        The whole operation must \
                               finish before the filesystem can be mounted again.\n        If cancelled or interrupted, run 'btrfstune -u' \
                               to restart.";

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.rewrite && args.rewrite_to.is_some() {
        bail!("random fsid can't be used with specified fsid: give -u or -U");
    }
    let is_rewrite = args.rewrite || args.rewrite_to.is_some();
    let rewrite_to = args.rewrite_to.as_ref().map(given).transpose()?;
    let tuning = args.tuning()?;
    if !is_rewrite && tuning.fsid.is_none() && tuning.seeding.is_none() && tuning.features.is_empty() {
        bail!("at least one option should be specified: -m, -M, -u, -U, -S, -r, -x or -n");
    }
    // btrfstune takes one device, and searches for the others.
    let all_named = (is_rewrite || tuning.fsid.is_some()) && !is_progs();
    let devices = opened(&args.devices, all_named)?;
    if tuning.seeding == Some(false) && !args.force {
        warn("this is dangerous, clearing the seeding flag may cause the derived device not to be mountable!");
        let question = "We are going to clear the seeding flag, are you sure? [y/N]:";
        if !std::io::stdin().is_terminal() || !is_confirmed(question)? {
            bail!("clear seeding flag canceled; give -f to clear it without a question");
        }
    }
    refuse_replacement(&devices)?;
    if is_rewrite {
        if is_progs() && !args.force {
            warn(REWRITE_WARNING);
            if !is_confirmed("We are going to change UUID, are your sure? [y/N]:")? {
                bail!("UUID change canceled");
            }
        }
        let fsid = with_progress_in_bytes("changing the UUID", |job| rewrite_id(&devices, rewrite_to, job))?;
        print_out(&format!("the UUID is {fsid} now, in all blocks\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    tune(&devices, &tuning)?;
    Ok(ExitCode::SUCCESS)
}
