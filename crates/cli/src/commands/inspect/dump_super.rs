//! `ubtrfs inspect dump-super`: prints superblocks as they are on the device.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{anyhow, bail};
use serde_json::{Value, json};
use ubtrfs_device::{Device, NamedDevice};
use ubtrfs_format::node::verify_csum;
use ubtrfs_format::print::{insert_name, print_superblock, superblock_json};
use ubtrfs_format::superblock::{MAGIC, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};

use crate::commands::committed::Committed;
use crate::common::{Shown, print_error, print_json, print_out};
use crate::progs::is_progs;

/// Print the superblock of a device
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image files or block devices
    #[arg(value_name = "DEVICE", required = true)]
    devices: Vec<PathBuf>,
    /// Print system chunks and root backups, too
    #[arg(short, long)]
    full: bool,
    /// Print all mirrors
    #[arg(short, long, conflicts_with_all = ["mirror", "bytenr"])]
    all: bool,
    /// Print this mirror: 0 (default), 1 or 2
    #[arg(short = 's', short_alias = 'i', long = "super", value_name = "MIRROR", value_parser = clap::value_parser!(u8).range(0..3))]
    mirror: Option<u8>,
    /// Print the superblock at this offset of the device
    #[arg(long, value_name = "OFFSET", conflicts_with = "mirror")]
    bytenr: Option<u64>,
    /// Print blocks without the magic of a superblock, too
    #[arg(short = 'F', long)]
    force: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    fn offsets(&self) -> Vec<u64> {
        let [primary, ..] = SUPERBLOCK_OFFSETS;
        if self.all {
            return SUPERBLOCK_OFFSETS.to_vec();
        }
        let mirror = self.mirror.and_then(|mirror| SUPERBLOCK_OFFSETS.get(usize::from(mirror)));
        vec![self.bytenr.or(mirror.copied()).unwrap_or(primary)]
    }
}

/// Prints the superblocks.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut status = ExitCode::SUCCESS;
    let mut values = Vec::new();
    for path in &args.devices {
        let committed = Committed::open(std::slice::from_ref(path))?;
        let Some(device) = committed.devices.first() else { continue };
        let path = device.path();
        for offset in args.offsets() {
            match read_complete(device, offset, committed.has_writer())? {
                // A mirror past the end of the device does not exist.
                None if args.all || is_progs() => {}
                None => bail!("{} ends before {offset}; choose another mirror", path.shown()),
                Some(raw) if raw.get(64..72) != Some(&MAGIC[..]) && !args.force && is_progs() => {
                    let name = path.shown();
                    let text = "(use --force to dump it anyway)";
                    status = print_error(&anyhow!("bad magic on superblock on {name} at {offset} {text}"));
                }
                Some(raw) if raw.get(64..72) != Some(&MAGIC[..]) && !args.force => {
                    crate::common::warn(&format!(
                        "{}: no superblock at {offset}; --force prints it anyway",
                        path.shown()
                    ));
                    status = ExitCode::FAILURE;
                }
                Some(raw) if args.json => values.push(to_json(path, offset, &raw)),
                Some(raw) => print_out(&to_text(path, offset, &raw, args.full)?)?,
            }
        }
    }
    if args.json {
        print_json(&Value::Array(values))?;
    }
    Ok(status)
}

/// Reads a superblock. Beside a writer, reads again while the checksum is wrong, because the writer may be writing it.
fn read_complete(device: &NamedDevice, offset: u64, has_writer: bool) -> anyhow::Result<Option<Vec<u8>>> {
    let mut raw = read(device, offset)?;
    for _ in 0..TRIES {
        let is_complete = raw.as_deref().is_none_or(has_right_csum);
        if !has_writer || is_complete {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
        raw = read(device, offset)?;
    }
    Ok(raw)
}

fn has_right_csum(raw: &[u8]) -> bool {
    let csum_type = Superblock::decode(raw).ok().and_then(|superblock| superblock.csum_type());
    csum_type.is_some_and(|csum_type| verify_csum(raw, csum_type).is_ok())
}

/// How often a superblock is read that is not valid.
const TRIES: u32 = 20;

fn read(device: &NamedDevice, offset: u64) -> anyhow::Result<Option<Vec<u8>>> {
    let mut raw = vec![0; SUPERBLOCK_SIZE];
    let end = u64::try_from(raw.len()).ok().and_then(|len| offset.checked_add(len));
    if end.is_none_or(|end| end > device.len_bytes()) {
        return Ok(None);
    }
    device.read_at(offset, &mut raw)?;
    Ok(Some(raw))
}

fn to_text(path: &Path, offset: u64, raw: &[u8], full: bool) -> anyhow::Result<String> {
    let mut text = format!("superblock: bytenr={offset}, device={}\n{}\n", path.shown(), "-".repeat(57));
    print_superblock(raw, full, &mut text)?;
    Ok(text)
}

fn to_json(path: &Path, offset: u64, raw: &[u8]) -> Value {
    let mut value = json!({ "offset": offset, "superblock": superblock_json(raw) });
    insert_name(&mut value, "device", path.as_os_str().as_encoded_bytes());
    value
}
