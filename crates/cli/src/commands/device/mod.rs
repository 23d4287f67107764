//! `ubtrfs device`: devices join and leave (`add`, `remove`), their error counters and space, and which devices are there,
//! printed as btrfs-progs prints them.

mod add;
mod remove;

pub(crate) use add::{new_device, tell_of_discard};
pub(crate) use remove::{devids_of, none_missing};

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use serde_json::json;
use ubtrfs_control::device::{DeviceStats, Request, Response};
use ubtrfs_control::{Channel, Response as AnyResponse, filesystem};
use ubtrfs_device::{Access, NamedDevice, block_devices};
use ubtrfs_format::print::escaped;
use ubtrfs_format::superblock::{MAGIC, Superblock};

use self::remove::is_same_device;
use super::committed::first_superblock;
use super::filesystem::{DeviceUsageArgs, device_usage};
use super::offline::{
    ImageOptions, ImageUse, find_device, given_devices, mount_options, open_device, with_image, with_members,
};
use super::place::{CommandTarget, FilesystemArgs, await_server, with_channel};
use crate::columns::columns;
use crate::common::{Shown, each, print_json, print_out, print_progs_json};
use crate::progs::is_progs;

/// Commands on devices
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Add(add::AddArgs),
    Remove(remove::RemoveArgs),
    Stats(StatsArgs),
    Usage(DeviceUsageArgs),
    Ready(ReadyArgs),
    Scan(ScanArgs),
}

/// Tell whether all devices of a filesystem are there
///
/// Exit status: 0 if they are, 1 if some are missing. With -o degraded, a filesystem is also ready if it can be opened
/// without the missing devices.
#[derive(clap::Args)]
struct ReadyArgs {
    /// One device or image of the filesystem
    #[arg(value_name = "DEVICE")]
    device: PathBuf,
    #[command(flatten)]
    image: ImageOptions,
}

/// Say which devices hold a btrfs
///
/// ubtrfs keeps no list of devices: it looks for the devices of a filesystem when it opens one of them.
#[derive(clap::Args)]
struct ScanArgs {
    /// The devices to examine; by default, all block devices
    #[arg(value_name = "DEVICE")]
    devices: Vec<PathBuf>,
    /// Accepted for compatibility; block devices are always found without help
    #[arg(short = 'd', long)]
    all_devices: bool,
    /// Accepted for compatibility: there is no list from which devices could be removed
    #[arg(short = 'u', long)]
    forget: bool,
}

/// Show how many errors each device had since the filesystem was made
///
/// The counters are kept in the filesystem. To find the file at an address that a message names, run: ubtrfs inspect
/// logical-resolve
#[derive(clap::Args)]
struct StatsArgs {
    /// Show the counters, then set them to 0
    #[arg(short = 'z', long)]
    reset: bool,
    /// Exit with status 64 if any counter is not 0
    #[arg(short, long)]
    check: bool,
    /// Print a table with a line for each device
    #[arg(short = 'T', conflicts_with = "json")]
    table: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of: FilesystemArgs,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Add(args) => add::run(&args),
        Command::Remove(args) => remove::run(&args),
        Command::Stats(args) => stats(args),
        Command::Usage(args) => Ok(device_usage(&args)),
        Command::Ready(args) => ready(&args),
        Command::Scan(args) => scan(&args),
    }
}

/// Divides the operands of a command into devices, and the filesystem at the end.
fn filesystem_of(paths: &[PathBuf]) -> anyhow::Result<(Vec<PathBuf>, CommandTarget)> {
    let Some((filesystem, devices)) = paths.split_last().filter(|(_, devices)| !devices.is_empty()) else {
        bail!("give the devices, then the filesystem: a directory in its mount, or an image");
    };
    let target = CommandTarget::from(filesystem.clone().into_os_string()).or_image().or_its_mount();
    Ok((devices.to_vec(), target))
}

/// Asks for facts about a filesystem.
fn call_filesystem(
    channel: &Channel<'_>,
    target: &CommandTarget,
    request: filesystem::Request,
) -> anyhow::Result<filesystem::Response> {
    match channel.call(ubtrfs_control::Request::Filesystem(request), &[]) {
        Ok(AnyResponse::Filesystem(response)) => Ok(response),
        Ok(_) => Err(unexpected(target)),
        Err(failure) => Err(failure).with_context(|| format!("cannot list the devices of {}", target.filesystem())),
    }
}

pub(crate) fn unexpected(target: &CommandTarget) -> anyhow::Error {
    anyhow!("the server of {target} gave an unexpected answer; unmount and mount with this ubtrfs")
}

fn ready(args: &ReadyArgs) -> anyhow::Result<ExitCode> {
    let nr_devices = superblock_of(&args.device)?.num_devices;
    let options = mount_options(&args.image)?;
    if options.degraded {
        return with_image(&args.device, &args.image, ImageUse::Read, |_| Ok(ExitCode::SUCCESS));
    }
    let nr_found = with_members(&given_devices(&args.device, &options))?.len();
    if u64::try_from(nr_found).is_ok_and(|found| found >= nr_devices) {
        return Ok(ExitCode::SUCCESS);
    }
    bail!(
        "the filesystem on {} has only {nr_found} of its {nr_devices} devices now; see: ubtrfs filesystem show",
        args.device.shown()
    )
}

fn scan(args: &ScanArgs) -> anyhow::Result<ExitCode> {
    if args.forget {
        return Ok(ExitCode::SUCCESS);
    }
    if args.devices.is_empty() {
        print_out("Scanning for Btrfs filesystems\n")?;
        for path in block_devices() {
            if superblock_of(&path).is_ok() {
                print_out(&format!("found: {}\n", path.shown()))?;
            }
        }
        return Ok(ExitCode::SUCCESS);
    }
    Ok(each(&args.devices, |path| {
        print_out(&format!("Scanning for btrfs filesystems on '{}'\n", path.shown()))?;
        superblock_of(path).map(drop)
    }))
}

/// The primary superblock of a device or image, as it is.
pub(crate) fn superblock_of(path: &Path) -> anyhow::Result<Superblock> {
    await_server(path)?;
    let device = match find_device(path)? {
        Some(found) => NamedDevice::open_found_beside_writer(found, path)?,
        // Fails with the reason.
        None => open_device(path, Access::ReadOnly)?,
    };
    let superblock = Superblock::decode(&first_superblock(&device));
    superblock
        .ok()
        .filter(|superblock| superblock.magic == MAGIC)
        .with_context(|| format!("{} holds no btrfs", path.shown()))
}

fn stats(args: StatsArgs) -> anyhow::Result<ExitCode> {
    let given = args.of.path.or_image();
    let device = match &given {
        CommandTarget::Image(at) if is_progs() && at.names().is_empty() => std::fs::canonicalize(&at.image).ok(),
        _ => None,
    };
    let target = given.or_its_mount();
    let (usage, what) = if args.reset { (ImageUse::Write, "reset") } else { (ImageUse::Read, "read") };
    let stats = with_channel(&target, &args.of.image, usage, |channel| {
        let call = |request| {
            let done = channel.call(ubtrfs_control::Request::Device(request), &[]);
            match done.map_err(|failure| anyhow!("cannot {what} the error counters of {target}: {failure}"))? {
                AnyResponse::Device(Response::Stats(stats)) => Ok(stats),
                _ => Err(unexpected(&target)),
            }
        };
        let all = call(Request::Stats)?;
        // As btrfs-progs, a device stands for itself, and a path for all devices.
        let devid = match &device {
            Some(device) => {
                let is_it = |path: &String| is_same_device(Path::new(path), device);
                let one = all.iter().find(|stats| stats.path.as_ref().is_some_and(is_it));
                Some(one.with_context(|| format!("{} is not a device of {target}", device.shown()))?.devid)
            }
            None => None,
        };
        match args.reset {
            true => call(Request::ResetStats { devid }),
            false => Ok(all.into_iter().filter(|stats| devid.is_none_or(|devid| stats.devid == devid)).collect()),
        }
    })?;
    match (args.json, args.table) {
        (true, _) if is_progs() => print_progs_json("device-stats", &stats.iter().map(progs_json).collect()),
        (true, _) => print_json(&stats.iter().map(|stats| json!(stats)).collect()),
        (_, true) => print_out(&table(&stats)),
        _ => print_out(&stats.iter().map(text).collect::<String>()),
    }?;
    let has_errors = stats.iter().any(|stats| counters(stats).iter().any(|(_, count)| *count > 0));
    Ok(if args.check && has_errors { ExitCode::from(HAS_ERRORS) } else { ExitCode::SUCCESS })
}

/// The counters as btrfs-progs has them in JSON.
fn progs_json(stats: &DeviceStats) -> serde_json::Value {
    let mut value = json!({ "device": device_of(stats), "devid": stats.devid.to_string() });
    for (name, count) in counters(stats) {
        value[name] = json!(count.to_string());
    }
    value
}

/// The exit status of `--check` if a counter is not 0, as in btrfs-progs.
const HAS_ERRORS: u8 = 64;

fn device_of(stats: &DeviceStats) -> String {
    stats.path.as_ref().map_or_else(|| format!("devid:{}", stats.devid), |path| escaped(path.as_bytes()))
}

/// Formats the counters as a table, as btrfs-progs does.
fn table(stats: &[DeviceStats]) -> String {
    let heads = ["Id", "Path", "Write errors", "Read errors", "Flush errors", "Corruption errors", "Generation errors"];
    let cells = |stats: &DeviceStats| {
        let counts = counters(stats).map(|(_, count)| count.to_string());
        [stats.devid.to_string(), device_of(stats)].into_iter().chain(counts).collect::<Vec<_>>()
    };
    let rows: Vec<Vec<String>> = stats.iter().map(cells).collect();
    columns(&[heads.map(str::to_owned).to_vec()], &[rows])
}

fn text(stats: &DeviceStats) -> String {
    let device = device_of(stats);
    counters(stats).iter().map(|(name, count)| format!("[{device}].{name:<16} {count}\n")).collect()
}

fn counters(stats: &DeviceStats) -> [(&'static str, u64); 5] {
    [
        ("write_io_errs", stats.write_io_errs),
        ("read_io_errs", stats.read_io_errs),
        ("flush_io_errs", stats.flush_io_errs),
        ("corruption_errs", stats.corruption_errs),
        ("generation_errs", stats.generation_errs),
    ]
}
