//! `ubtrfs mount DEVICE DIR`.
//!
//! ```text
//! ubtrfs mount ----starts itself with --serve----> server: opens the image, mounts
//!      | waits for one byte                            | writes the byte when the mount works
//!      v                                               v
//!   exit 0, or 1 when the server ended without it   serves until umount, then the final commit
//! ```
//!
//! If the image is mounted already, and this user may control its server, that server takes the further mount (`join.rs`).
//!
//! Invariants:
//! C1. Problems with the mount point or FUSE are found before the image is opened, so the image stays untouched.
//! C2. Exit status 0 means that the mount works. An error is printed once, by the process in which it happens.

mod helper;
mod join;
pub mod option_list;
mod options;

use std::ffi::OsString;
use std::io::{IsTerminal, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ubtrfs_archive::host_file::HostFile;
use ubtrfs_control::{Channel, filesystem};
use ubtrfs_device::{Access, Device, OpenError, is_object_url, is_url};
use ubtrfs_format::DevId;
use ubtrfs_fs::{Caller, DeviceSummary, Fs, MemberState, MountOptions, SetAttr, SubvolumeInfo};
use ubtrfs_fuse::transport::Transport;
use ubtrfs_fuse::{DetachedMount, Identity, MountConfig, MountError, Mounted, PrivilegedHelper, RemountScope, Session};

use self::helper::HelperCaller;
use self::options::Trust;
use super::offline::{device_notes, not_opened, open_devices};
use super::place::{await_server, refuse_names_of_others};
use crate::common::{Shown, parse_memory, parse_size, print_error, warn};
use crate::logging;
use crate::new_image::NewImage;

pub(crate) use helper::as_mount_helper;

/// Mount a btrfs image or device on a directory
///
/// If root has mounted it already, root can mount it again: another subvolume, or with other flags of the mount point.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Image file, block device or NBD export (nbd://HOST/EXPORT); further devices of the filesystem may follow, and are found beside it without that
    #[arg(value_name = "DEVICE...")]
    device: PathBuf,
    /// Mount point: an empty directory
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// The devices between the first and the mount point, then the mount point
    #[arg(value_name = "DIR", hide = true)]
    more: Vec<PathBuf>,
    /// Mount options, separated by commas: options of btrfs and of the mount point
    #[arg(short = 'o', long = "options", value_name = "OPTIONS", long_help = option_list::help())]
    options: Vec<String>,
    /// Mount read-only
    #[arg(short = 'r', long)]
    read_only: bool,
    /// Stay in the foreground until the filesystem is unmounted
    #[arg(short, long)]
    foreground: bool,
    /// Create and format the image file if it does not exist, with this size in bytes or with K, M, G or T
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    create: Option<u64>,
    /// Memory of the server, in bytes or with K, M or G (at least 16M; below 144M it may take up to 144M); by default a
    /// quarter of the machine's memory, at most 1G
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    memory: Option<u64>,
    /// Compress new data with zstd, lzo or zlib, or with a level, such as zstd:3; --compress alone means zstd, and new data
    /// is not compressed by default
    #[arg(long, value_name = "METHOD", num_args = 0..=1, require_equals = true, default_missing_value = "zstd")]
    compress: Option<String>,
    /// Write a timeline of commits and writeback, for chrome://tracing or ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// For images from other people: confine the server after mounting (seccomp, Landlock), and mount nodev and nosuid,
    /// unless -o dev or suid is given. Default when an ordinary user mounts an image file
    ///
    /// The server then cannot open files, make network connections or run programs, and it runs as the owner of the image
    /// file, or as nobody, instead of root. Root's mounts without this option, like Linux's own, let device files and
    /// set-user-id programs in the image work. Mounts of ordinary users never do.
    #[arg(long, conflicts_with = "no_sandbox")]
    sandbox: bool,
    /// Do not confine the server
    #[arg(long)]
    no_sandbox: bool,
    /// This process unmounts for a confined server
    #[arg(long, hide = true)]
    unmounter: bool,
    /// This process first mounts the subvolume with this path
    #[arg(long, hide = true, requires = "unmounter")]
    subtree: Option<OsString>,
    /// Check the arguments without mounting
    #[arg(long, hide = true)]
    fake: bool,
    /// This process is the server
    #[arg(long, hide = true)]
    serve: bool,
    /// The server ends with a status of its own if another one has just mounted the image
    #[arg(long, hide = true)]
    may_join: bool,
}

impl Args {
    /// Makes options of the devices behind the first: the last path is the mount point.
    fn with_devices_as_options(mut self) -> anyhow::Result<Self> {
        let Some(dir) = self.more.pop() else { return Ok(self) };
        let second = std::mem::replace(&mut self.dir, dir);
        for path in std::iter::once(second).chain(std::mem::take(&mut self.more)) {
            match path.to_str().filter(|path| !path.contains(',')) {
                Some(path) => self.options.push(format!("device={path}")),
                None => bail!(
                    "{} has a comma or bytes that are no text, so it cannot be an option; put it beside {}, where it is found",
                    path.shown(),
                    self.device.shown()
                ),
            }
        }
        Ok(self)
    }
}

/// Mounts. For mount(8), every failure has the status that it has for Linux's btrfs.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let is_of_mount = !args.serve && !args.unmounter && HelperCaller::of_this_process() != HelperCaller::Other;
    match run_command(args) {
        Ok(ExitCode::FAILURE) if is_of_mount => Ok(ExitCode::from(MOUNT_FAILED)),
        Err(error) if is_of_mount => {
            print_error(&error);
            Ok(ExitCode::from(MOUNT_FAILED))
        }
        done => done,
    }
}

fn run_command(args: Args) -> anyhow::Result<ExitCode> {
    let args = args.with_devices_as_options()?;
    if args.unmounter {
        ubtrfs_fuse::serve_unmounts(&args.device, &args.dir, args.subtree.as_deref());
        return Ok(ExitCode::SUCCESS);
    }
    await_server(&args.dir)?;
    if options::is_remount(&args.options) {
        return remount(&args);
    }
    let options::Parsed { mut config, mut options, fuseblk } = options::parse(&args.options)?;
    apply_flags(&args, &mut config, &mut options)?;
    config.given = given(&args);
    if !args.serve && !args.fake && join::is_there(&args, &options) {
        return Ok(already_mounted(&args));
    }
    let dir = ubtrfs_fuse::check(&args.dir, &config)?;
    if config.submounts && fuseblk {
        bail!("submounts and fuseblk exclude each other: only one mount can lend the device to the kernel; omit one");
    }
    if args.fake {
        return Ok(ExitCode::SUCCESS);
    }
    refuse_names_of_others(&args.device)?;
    let is_of_mount = || HelperCaller::of_this_process() != HelperCaller::Other;
    if !args.serve && helper::passes_over(&args.options, &args.device) && is_of_mount() {
        return Ok(ExitCode::SUCCESS);
    }
    if !args.serve {
        let until = Instant::now() + JOIN_PATIENCE;
        loop {
            if join::join(&args, &dir, &mut config, &options)? {
                return Ok(ExitCode::SUCCESS);
            }
            if args.foreground {
                break;
            }
            match start_server(&args, &dir, ubtrfs_fuse::is_root() && Instant::now() < until)? {
                ServerStart::Yes(status) => return Ok(status),
                ServerStart::ButOther => std::thread::sleep(JOIN_PAUSE),
            }
        }
    }
    if args.serve {
        // Leave the terminal's session, so that signals from the terminal, such as Ctrl-C, do not reach the server.
        let _ = rustix::process::setsid();
    } else {
        logging::to_stderr();
    }
    let opened = open(&args, &mut config, options, fuseblk);
    if opened.is_err() && args.may_join && join::may_succeed(&args.device) {
        return Ok(ExitCode::from(OTHER_SERVER));
    }
    let Opened { fs, block_device, notes } = opened?;
    let (mut timeline, mut timeline_end) = (None, None);
    if let Some(path) = &args.timeline {
        // The image is already open, so `HostFile::named` fails if the timeline's path leads to the image.
        let file = HostFile::named(path, 0o666)?;
        let cannot = || format!("cannot write {}", path.shown());
        timeline_end = Some(file.file().try_clone().with_context(cannot)?);
        file.file().try_clone().and_then(|file| fs.start_timeline(file)).with_context(cannot)?;
        timeline = Some(file);
    }
    // Start the process that unmounts for a confined server before the mount is on its directory, so that nothing is
    // mounted if a requested confinement is impossible.
    let mut unmounter = None;
    if config.sandbox && !Session::places_later(&fs) {
        unmounter = Some(start_unmounter(&args, &dir, None)?);
    }
    let mut session = Session::mount_device(fs, &dir, &config, block_device)?;
    if config.sandbox && unmounter.is_none() {
        unmounter = Some(start_unmounter(&args, &dir, session.take_placement())?);
    }
    if let Err(reason) = session.is_fuseblk() {
        warn(&format!("warning: the option fuseblk has no effect: {reason}"));
    }
    if let Some(text) = options::not_granted(&args.options, &config) {
        warn(&text);
    }
    if let Some(file) = timeline {
        file.keep().context("cannot write the timeline")?;
    }
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    if args.serve {
        let _ = std::env::set_current_dir("/");
        logging::to_syslog(&args.device, &dir);
        for note in &notes {
            tracing::warn!("{note}");
        }
    }
    if let Some(unmounter) = unmounter {
        tell_of_loops(&args, &config);
        let done = session.confine(unmounter, Identity::for_image(&args.device));
        warn_of_missing(&done.missing);
    } else {
        session.watch_images();
    }
    tell_of_rings(&config);
    let is_awaited = args.serve;
    let done = session.run_and_tell(move |missing| {
        warn_of_missing(missing);
        if is_awaited && let Err(error) = report_mounted(&null) {
            tracing::warn!("the server keeps the files of the command that started it: {error}");
        }
    });
    if let Some(mut file) = timeline_end {
        // A comma follows every earlier event. Errors are ignored, because viewers accept a list without an end.
        let _ = file.write_all(TIMELINE_END);
    }
    done?;
    Ok(ExitCode::SUCCESS)
}

/// Ends a mount of what is mounted on the same directory already. `mount -a` passes over it, and any other mount is
/// refused, as for Linux's btrfs.
fn already_mounted(args: &Args) -> ExitCode {
    let (dir, mounted) = (args.dir.shown(), args.device.shown());
    let refuse = || print_error(&MountError::Occupied { dir, mounted }.into());
    match HelperCaller::of_this_process() {
        HelperCaller::MountAll => ExitCode::SUCCESS,
        HelperCaller::Mount | HelperCaller::Other => refuse(),
    }
}

/// The status of mount(8) for a mount that failed.
const MOUNT_FAILED: u8 = 32;

fn warn_of_missing(missing: &[String]) {
    for missing in missing {
        warn(&format!("the server is not fully confined: {missing}"));
    }
}

/// The last event and the end of the list of a timeline.
const TIMELINE_END: &[u8] = b"{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":1,\"args\":{\"name\":\"ubtrfs\"}}\n]\n";

/// Prints a hint for root at a terminal if requests do not go through io_uring only because it is switched off in the
/// kernel.
fn tell_of_rings(config: &MountConfig) {
    let is_asked_for = config.transport == Transport::Auto && ubtrfs_fuse::is_root();
    if is_asked_for && ubtrfs_device::fuse_rings_are_off() && std::io::stderr().is_terminal() {
        warn(
            "requests go through /dev/fuse; through io_uring, work on many small files takes about a third less time: run \
             echo Y > /sys/module/fuse/parameters/enable_uring before mounting, or mount with -o noio_uring",
        );
    }
}

/// Tells root at a terminal what a confined server does not protect from. An ordinary user cannot attach loop devices, so
/// for the mounts of users, only the guide says it.
fn tell_of_loops(args: &Args, config: &MountConfig) {
    let is_writable_image = !config.read_only && args.device.is_file();
    let has_loop_devices = ubtrfs_fuse::is_root() && Path::new("/dev/loop-control").exists();
    if is_writable_image && has_loop_devices && std::io::stderr().is_terminal() {
        warn(
            "a confined server cannot claim loop devices over the image: do not run mount -o loop or losetup on the image \
             before it is unmounted",
        );
    }
}

/// Changes the flags of an existing mount, and how its filesystem writes new data.
fn remount(args: &Args) -> anyhow::Result<ExitCode> {
    let mut mounted = Mounted::find(&args.dir)?;
    let was_read_only = mounted.config.read_only;
    let given = if mounted.other_user.is_none() { given_at_mount(&mounted.dir) } else { None };
    let shown = if mounted.other_user.is_none() { subvolume_at(&mounted.dir) } else { None };
    let mut for_engine = options::change(&args.options, &mut mounted, given.as_deref(), shown.as_ref())?;
    mounted.config.read_only |= args.read_only;
    let is_writable = !mounted.config.read_only;
    let becomes_writable = was_read_only && is_writable;
    if let Some(uid) = mounted.other_user.filter(|_| becomes_writable) {
        bail!("user {uid} mounted {}; make it writable as that user", args.dir.shown());
    }
    // The kernel's flag may be set already: mount(8) changes it by itself if it is called without a type.
    let is_served_read_only = match becomes_writable {
        true => is_served_read_only(&mounted.dir)?,
        false => is_writable && mounted.other_user.is_none() && is_served_read_only(&mounted.dir).unwrap_or(false),
    };
    if is_served_read_only {
        bail!(
            "{} was opened read-only and cannot become writable; unmount it and mount it again without ro",
            args.dir.shown()
        );
    }
    for_engine.extend(args.compress.as_ref().map(|method| format!("compress={method}")));
    if args.memory.is_some() || args.create.is_some() || args.timeline.is_some() {
        bail!(
            "a remount changes only ro, rw, commit=, compress=, datacow, datasum and the flags of the mount point; unmount it \
             and mount it again"
        );
    }
    if !args.fake {
        let scope = match args.read_only || options::names_shared_flag(&args.options) {
            true => RemountScope::Filesystem,
            false => RemountScope::Mount,
        };
        mounted.remount(&named_as_mounted(&mounted, &args.device), scope)?;
        if !for_engine.is_empty() {
            change_options(&mounted.dir, for_engine)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Changes options of a mounted filesystem.
fn change_options(dir: &Path, options: Vec<String>) -> anyhow::Result<()> {
    let request = ubtrfs_control::Request::Filesystem(filesystem::Request::ChangeOptions { options });
    let failed = || format!("cannot change mount options of {}", dir.shown());
    Channel::mount(dir).with_context(failed)?.call(request, &[]).with_context(failed)?;
    Ok(())
}

/// The device by which a filesystem is mounted, if the given one is another device of it; else the given one.
fn named_as_mounted(mounted: &Mounted, device: &Path) -> PathBuf {
    let server = || Channel::mount(&mounted.dir).ok()?.server();
    let is_of_server =
        |server| ubtrfs_device::lock_holders(device).contains(&server) && !ubtrfs_device::is_seed(device);
    let is_other = device != mounted.source() && mounted.other_user.is_none();
    match is_other && server().is_some_and(is_of_server) {
        true => mounted.source(),
        false => device.to_owned(),
    }
}

/// The options of this command line, with those that were given as flags.
fn given(args: &Args) -> Vec<String> {
    let mut given = args.options.clone();
    given.extend(args.read_only.then(|| "ro".to_owned()));
    given.extend(args.memory.map(|bytes| format!("memory={bytes}")));
    given.extend(args.compress.as_ref().map(|method| format!("compress={method}")));
    given
}

/// The options that a mount was made with; `None` if its server does not tell them.
fn given_at_mount(dir: &Path) -> Option<Vec<String>> {
    let request = ubtrfs_control::Request::Filesystem(filesystem::Request::MountOptions);
    match Channel::mount(dir).ok()?.call(request, &[]).ok()? {
        ubtrfs_control::Response::Filesystem(filesystem::Response::MountOptions(given)) => Some(given),
        _ => None,
    }
}

/// The subvolume that is mounted on a directory; `None` if its server does not tell it.
fn subvolume_at(dir: &Path) -> Option<SubvolumeInfo> {
    let channel = Channel::mount(dir).ok()?;
    let (subvolume, is_root) = channel.subvolume_of(&channel.open(dir).ok()?).ok()?;
    is_root.then_some(subvolume)
}

/// Whether a mount's server opened the filesystem read-only, so that the mount cannot be made writable.
fn is_served_read_only(dir: &Path) -> anyhow::Result<bool> {
    let text = super::stats::mount_stats(dir)?;
    Ok(text.lines().any(|line| line.trim() == "ubtrfs_read_only 1"))
}

fn apply_flags(args: &Args, config: &mut MountConfig, options: &mut MountOptions) -> anyhow::Result<()> {
    let is_object = is_object_url(&args.device);
    let mut asked =
        args.options.iter().flat_map(|list| list.split(',')).filter(|option| matches!(*option, "ro" | "rw"));
    if is_object && !args.read_only && asked.next_back() == Some("rw") {
        bail!("{} is an object, which can only be read; leave out rw", args.device.shown());
    }
    if args.read_only || is_object {
        config.read_only = true;
        options.read_only = true;
    }
    if let Some(bytes) = args.memory {
        options.memory_bytes = bytes;
    }
    if let Some(method) = &args.compress {
        options.compress = MountOptions::parse(&format!("compress={method}"))?.compress;
    }
    config.sandbox = args.sandbox || (!args.no_sandbox && is_image_of_ordinary_user(&args.device));
    options::distrust(&args.options, config, if args.sandbox { Trust::Nothing } else { Trust::Image });
    if args.create.is_some() && options.read_only {
        bail!(
            "--create makes an empty filesystem, which cannot be used read-only; omit --create or the read-only option"
        );
    }
    Ok(())
}

/// How long a mount waits for another one of the same image that has begun at the same time.
const JOIN_PATIENCE: Duration = Duration::from_secs(10);
const JOIN_PAUSE: Duration = Duration::from_millis(20);
/// The exit status of a server that could not open the image because another server has it.
const OTHER_SERVER: u8 = 3;

/// The outcome of an attempt to start a server.
enum ServerStart {
    /// The mount works, or the server has printed why not.
    Yes(ExitCode),
    /// Another server has mounted the image, or is about to.
    ButOther,
}

/// Starts the server in the background; returns when the mount works or the server has failed.
fn start_server(args: &Args, dir: &Path, may_join: bool) -> anyhow::Result<ServerStart> {
    let program = std::env::current_exe().context("cannot find this program to start it in the background; use -f")?;
    let mut command = Command::new(program);
    command.args(["mount", "--serve"]);
    if may_join {
        command.arg("--may-join");
    }
    for option in &args.options {
        command.arg("-o").arg(option);
    }
    if args.read_only {
        command.arg("-r");
    }
    if let Some(bytes) = args.create {
        command.arg(format!("--create={bytes}"));
    }
    if let Some(bytes) = args.memory {
        command.arg(format!("--memory={bytes}"));
    }
    if let Some(method) = &args.compress {
        command.arg(format!("--compress={method}"));
    }
    if let Some(file) = &args.timeline {
        command.arg("--timeline").arg(file);
    }
    if args.sandbox {
        command.arg("--sandbox");
    }
    if args.no_sandbox {
        command.arg("--no-sandbox");
    }
    let device = match args.device.starts_with("/dev/fd") || args.device.starts_with("/proc/self/fd") {
        // The path contains a file descriptor of this process, which the server does not inherit, so resolve the path
        // now.
        true => std::fs::canonicalize(&args.device).unwrap_or_else(|_| args.device.clone()),
        false => args.device.clone(),
    };
    command.arg("--").arg(device).arg(dir);
    // The server must not keep locks or pipes of the caller open.
    ubtrfs_device::keep_files_from_children();
    let mut server = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the server in the background; use -f")?;
    let mut byte = [0];
    let ready = server.stdout.take().is_some_and(|mut out| out.read_exact(&mut byte).is_ok());
    if ready {
        return Ok(ServerStart::Yes(ExitCode::SUCCESS));
    }
    let status = server.wait().context("the server process was not found")?;
    match status.code() {
        // The server has printed the reason.
        Some(1) => Ok(ServerStart::Yes(ExitCode::FAILURE)),
        Some(status) if status == i32::from(OTHER_SERVER) => Ok(ServerStart::ButOther),
        _ => bail!("the server ended before the mount worked ({status}); try -f to see more"),
    }
}

/// Whether an ordinary user mounts an image file. The server of such a mount is confined by default, because image
/// files often come from other people.
fn is_image_of_ordinary_user(device: &Path) -> bool {
    !rustix::process::geteuid().is_root() && !is_block_device(device)
}

fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
}

/// Starts the process that unmounts for a confined server. With `placement`, it first puts the mount on its directory.
fn start_unmounter(args: &Args, dir: &Path, placement: Option<DetachedMount>) -> anyhow::Result<PrivilegedHelper> {
    let program = std::env::current_exe().context("cannot find this program to start its helper; use --no-sandbox")?;
    let mut command = Command::new(program);
    // The helper runs in the root directory, so a relative path would not lead to the device.
    let device = match is_url(&args.device) {
        true => args.device.clone(),
        false => std::path::absolute(&args.device).unwrap_or_else(|_| args.device.clone()),
    };
    command.args(["mount", "--unmounter"]).arg(device).arg(dir);
    command.current_dir("/");
    ubtrfs_device::keep_files_from_children();
    PrivilegedHelper::start(command, placement).context("cannot start the helper that unmounts; use --no-sandbox")
}

/// Tells the waiting command that the mount works. Then replaces this server's stdin, stdout and stderr by `null`, so
/// that the server does not keep the command's terminal or pipes open.
fn report_mounted(null: &std::fs::File) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    // Errors are ignored: the waiting command may have been killed, but the mount is still useful.
    let _ = out.write_all(b"R").and_then(|()| out.flush());
    rustix::stdio::dup2_stdin(null)?;
    rustix::stdio::dup2_stdout(null)?;
    rustix::stdio::dup2_stderr(null)?;
    Ok(())
}

struct Opened {
    fs: Arc<Fs>,
    /// The device of a mount that should have the type `fuseblk`.
    block_device: Option<Arc<dyn Device>>,
    /// Messages about the devices.
    notes: Vec<String>,
}

/// Opens the filesystem. If the image can only be opened read-only, prints the reason and mounts read-only.
fn open(args: &Args, config: &mut MountConfig, mut options: MountOptions, fuseblk: bool) -> anyhow::Result<Opened> {
    let access = if options.read_only { Access::ReadOnly } else { Access::ReadWrite };
    let made = match args.create {
        Some(size) if !is_url(&args.device) && !args.device.exists() => create(&args.device, size)?,
        _ => false,
    };
    let opened = open_devices(&args.device, &options, access);
    let devices = opened.map_err(|error| join::explained(error, &args.device))?;
    let first = devices.first().cloned();
    // The kernel refers to inodes that it has looked up. With this option, `fs` counts these references, so that an
    // inode stays valid until the kernel forgets it.
    options.track_lookups = true;
    let shown = args.device.shown();
    let wanted_read_only = options.read_only;
    let fs = Fs::open(devices, options).map_err(|error| not_opened("mount", &args.device, error))?;
    fs.resume_balance_in_background();
    let mut notes = device_notes(&fs);
    // The reason of a mount that is read-only unasked names the missing devices.
    let names_missing = !wanted_read_only && fs.read_only().is_some();
    notes.extend(missing_note(&fs, args).filter(|_| !names_missing));
    notes.iter().for_each(|note| warn(note));
    if let Some(reason) = fs.read_only().filter(|_| !wanted_read_only) {
        warn(&format!("{shown} is mounted read-only: {reason}"));
        config.read_only = true;
    }
    let full = std::fs::canonicalize(&args.device).unwrap_or_else(|_| args.device.clone()).shown();
    if config.fsname == ubtrfs_fuse::SUBTYPE {
        config.fsname.clone_from(&full);
    }
    let obstacle = obstacle_to_fuseblk(args, config, &full);
    if let Some(reason) = obstacle.filter(|_| fuseblk) {
        warn(&format!("warning: the option fuseblk has no effect: {reason}"));
    }
    if made && !ubtrfs_fuse::is_root() {
        chown_root(&fs)?;
    }
    Ok(Opened { fs, block_device: first.filter(|_| fuseblk && obstacle.is_none()), notes })
}

/// Names the missing devices of a mount, and how to do without them or take them back.
fn missing_note(fs: &Fs, args: &Args) -> Option<String> {
    let (_, devices) = fs.devices_at_open();
    let is_missing = |device: &&DeviceSummary| device.state == MemberState::Missing;
    let (devids, missing): (Vec<DevId>, Vec<String>) = devices
        .iter()
        .filter(is_missing)
        .map(|device| (device.devid, format!("device {} (uuid {})", device.devid, device.uuid)))
        .unzip();
    if missing.is_empty() {
        return None;
    }
    let dir = args.dir.shown();
    if fs.read_only().is_some() {
        return Some(format!(
            "{} is mounted without {}: content without a copy on the other devices cannot be read; see: ubtrfs filesystem usage {dir}",
            args.device.shown(),
            missing.join(", "),
        ));
    }
    let on_those_left = match fs.check_enough_devices_without(&devids).is_ok() {
        true => format!(", or on those that are left: ubtrfs device remove missing {dir}"),
        false => {
            format!(", or add a device (ubtrfs device add DEVICE {dir}), and then: ubtrfs device remove missing {dir}")
        }
    };
    Some(format!(
        "{} is mounted without {}: some content has fewer copies than it should; mount again with all devices named, or make new \
         copies on another device: ubtrfs replace start missing DEVICE {dir}{on_those_left}; see: ubtrfs filesystem usage {dir}",
        args.device.shown(),
        missing.join(", "),
    ))
}

/// The reason why a mount cannot have the type `fuseblk`. `full` is the full path of the device.
fn obstacle_to_fuseblk(args: &Args, config: &MountConfig, full: &str) -> Option<&'static str> {
    match () {
        () if !is_block_device(&args.device) || !ubtrfs_fuse::is_root() => {
            Some("only root's mounts of block devices can have this type")
        }
        () if config.read_only => Some("the mount is read-only"),
        // The kernel claims the device that `fsname` names.
        () if config.fsname != full => Some("fsname= names another path than the device's"),
        () => None,
    }
}

/// Creates and formats an image file. Returns false if another process made the file meanwhile.
fn create(path: &Path, size: u64) -> anyhow::Result<bool> {
    let image = NewImage::create(path, size)?;
    let made = ubtrfs_mkfs::make(image.device().as_ref(), &ubtrfs_mkfs::MkfsOptions::default());
    made.with_context(|| format!("cannot format {}", path.shown()))?;
    match image.keep() {
        Err(error) if matches!(error.downcast_ref(), Some(OpenError::Exists { .. })) => Ok(false),
        kept => kept.map(|()| true),
    }
}

/// Makes the current user the owner of the root directory, so that the user can write to the new filesystem.
fn chown_root(fs: &Fs) -> anyhow::Result<()> {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let set = SetAttr { uid: Some(uid), gid: Some(gid), ..SetAttr::default() };
    fs.setattr(fs.root(), &set, &Caller::ROOT)?;
    Ok(())
}
