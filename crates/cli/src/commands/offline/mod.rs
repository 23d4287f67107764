//! Commands that run the engine in this process, without a mount: `import`, `export`, and those on files, such as `ls`
//! and `cp`, with `IMAGE:/path`.
//!
//! Invariants:
//! - I1. `with_image` always closes the image that it opened. Changes made so far are committed, and if the work
//!   failed, its error is reported.
//! - I2. Paths inside an image never lead out of it: `..` stops at the image's root.
//! - I3. Permissions are not checked: whoever may write to the image may change every file in it. Read-only subvolumes
//!   and the flags immutable and append-only are respected.
//!
//! Crate `archive` ensures that an import, and a copy to the host, change nothing outside of the target directory.

pub(crate) mod attributes;
pub(crate) mod copy;
pub(crate) mod diff;
pub(crate) mod edit;
pub(crate) mod export;
pub(crate) mod fill_options;
pub(crate) mod find;
pub(crate) mod held;
pub(crate) mod import;
pub(crate) mod link;
pub(crate) mod list;
mod mode_change;
mod operands;
mod owner;
mod pattern;
pub(crate) mod rename;
mod target;
pub(crate) mod text;
pub(crate) mod touch;
mod walk;
pub(crate) mod xattr;

use std::ffi::OsStr;
use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

use anyhow::{Context, bail};
pub(crate) use ubtrfs_archive::walk::{
    COPY_LEN, DirName, VisitedDirs, child_path, data_ranges, join, normal_names, os_string, push_name, read_names,
    read_pieces, temporary_name, type_of,
};
use ubtrfs_control::{Channel, ImageWork};
use ubtrfs_device::{Access, Device, MissedChanges, NamedDevice, OpenError, find_members, is_seed, is_url, lock_order};
use ubtrfs_fs::{Attr, DeviceSummary, Fs, InodeId, MemberState, MountOptions, Rescue, find_devices};

use super::committed::refuse_foreign;
use super::place::{await_server, find_own, is_in_mount, is_same_file, refuse_names_of_others};
use crate::common::{Shown, parse_memory, warn};
use crate::logging;

/// `IMAGE:/path`: a file in an image, split at the last `:/`.
#[derive(Clone, Debug)]
pub(crate) struct ImagePath {
    pub(crate) image: PathBuf,
    /// The absolute path. The path ends in `/` if the user wrote a slash at its end.
    pub(crate) path: Vec<u8>,
}

impl ImagePath {
    /// Splits the text. Returns `None` for a path of the host.
    pub(crate) fn split(text: &OsStr) -> Option<Self> {
        let bytes = text.as_bytes();
        // The first `:/` of a URL ends its scheme.
        let first = if is_url(Path::new(text)) { bytes.windows(2).position(|pair| pair == b":/")? } else { 0 };
        let at = bytes.windows(2).rposition(|pair| pair == b":/").filter(|at| *at > first)?;
        Some(Self { image: PathBuf::from(OsStr::from_bytes(&bytes[..at])), path: bytes[at + 1..].to_vec() })
    }

    /// Splits the text. Fails for a path of the host, with advice.
    pub(crate) fn parse(text: &OsStr) -> anyhow::Result<Self> {
        Self::split(text).ok_or_else(|| anyhow::Error::msg(no_image_path(text)))
    }

    /// Splits the path into the path of a directory and the last name; `None` for the root. `..` inside of the path
    /// leads to the parent of the directory before it, also through a symbolic link. At the end of the path it removes
    /// a name.
    pub(crate) fn split_name(&self) -> Option<(Vec<u8>, &[u8])> {
        let end = self.path.iter().rposition(|byte| *byte != b'/')?;
        let start = self.path[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
        let name = &self.path[start..=end];
        if !matches!(name, b"." | b"..") {
            return Some((self.path[..start].to_vec(), name));
        }
        self.names().split_last().map(|(name, dirs)| (join(dirs), *name))
    }

    /// Returns the names of the path, without empty names and `.`; `..` removes the name before it.
    pub(crate) fn names(&self) -> Vec<&[u8]> {
        normal_names(&self.path)
    }
}

impl fmt::Display for ImagePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.image.shown(), text::printable(&self.path))
    }
}

/// Clap's parser of `IMAGE:/path`.
#[derive(Clone, Debug, Default)]
pub(crate) struct ImagePathParser {
    /// Whether an image without a path is accepted and means its root directory.
    pub(crate) root_by_default: bool,
}

impl clap::builder::TypedValueParser for ImagePathParser {
    type Value = ImagePath;

    fn parse_ref(
        &self,
        _command: &clap::Command,
        _arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Self::Value, clap::Error> {
        let lacks_slash = lacks_slash(&value.shown()).filter(|_| !Path::new(value).exists());
        let alone = || {
            if lacks_slash.is_some() {
                return None;
            }
            let mut image = value.as_bytes();
            while let Some(rest) = image.strip_suffix(b":") {
                image = rest;
            }
            self.root_by_default.then(|| ImagePath { image: os_string(image).into(), path: b"/".to_vec() })
        };
        let no_path = || clap::Error::raw(clap::error::ErrorKind::ValueValidation, no_image_path(value));
        ImagePath::split(value).or_else(alone).ok_or_else(no_path)
    }
}

/// Explains why a text does not name a file in an image.
fn no_image_path(text: &OsStr) -> String {
    let shown = text.shown();
    let image = shown.trim_end_matches(':');
    misplaced(Path::new(text), &shown)
        .unwrap_or_else(|| format!("'{shown}' names no file in an image; write IMAGE:/path, for example {image}:/etc"))
}

/// Explains why a path without `:/` names no file in an image: it is in a mount, or the slash is missing.
fn misplaced(path: &Path, shown: &str) -> Option<String> {
    // The path may be new: then its directory tells.
    if is_in_mount(path) || path.parent().is_some_and(is_in_mount) {
        return Some(format!(
            "'{shown}' is in a mount of ubtrfs, and this command works on an image that is not mounted (IMAGE:/path); in the \
             mount, use the programs of the system, such as ls, cat, cp, rm, mkdir, stat and tar"
        ));
    }
    lacks_slash(shown)
}

/// The advice for the path of a file in an image whose first slash is missing, such as `disk.img:etc`.
pub(crate) fn lacks_slash(shown: &str) -> Option<String> {
    let lacks_it = |(image, inside): &(&str, &str)| {
        let image = Path::new(image);
        !inside.is_empty() && !inside.starts_with('/') && await_server(image).is_ok() && image.is_file()
    };
    let (image, inside) = shown.rsplit_once(':').filter(lacks_it)?;
    Some(format!("a path in an image starts with a slash: {image}:/{inside}"))
}

/// How an image is opened.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct ImageOptions {
    /// Mount options with which an image is opened, such as compress=zstd:3,subvol=home
    #[arg(short = 'o', long, value_name = "OPTIONS")]
    pub(crate) options: Vec<String>,
    /// Memory of the program for an image, in bytes or with K, M or G (at least 16M; below 144M it may take up to
    /// 144M); by default a quarter of the machine's memory, at most 1G
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    pub(crate) memory: Option<u64>,
}

/// Works like [`ImageOptions`], for commands where `-o` has the meaning that it has in btrfs-progs.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct LongImageOptions {
    /// Mount options with which an image is opened, such as compress=zstd:3,subvol=home
    #[arg(long, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Memory of the program for an image, as in other commands
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    memory: Option<u64>,
}

impl From<LongImageOptions> for ImageOptions {
    fn from(LongImageOptions { options, memory }: LongImageOptions) -> Self {
        Self { options, memory }
    }
}

/// The help on paths for commands that take patterns.
const PATTERNS_HELP: &str = "PATH may have patterns with *, ? and [...], for example 'disk.img:/etc/*.conf'.";

/// Whether a command reads or changes an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageUse {
    Read,
    Write,
}

/// Opens an image, does the work, and closes the image (I1).
pub(crate) fn with_image<T>(
    image: &Path,
    options: &ImageOptions,
    usage: ImageUse,
    work: impl FnOnce(&Fs) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    with_shared_image(image, options, usage, |fs| work(fs))
}

/// Works like [`with_image`], for work that other threads take part in. They must have dropped the filesystem when the
/// work ends.
pub(crate) fn with_shared_image<T>(
    image: &Path,
    options: &ImageOptions,
    usage: ImageUse,
    work: impl FnOnce(&Arc<Fs>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    if let Some(fs) = held::held(image) {
        if !options.options.is_empty() || options.memory.is_some() {
            bail!("the image is open; give -o and --memory to the command that opened it");
        }
        return work_on(image, &fs, usage, work);
    }
    if usage != ImageUse::Read {
        held::refuse_change_of(image)?;
    }
    let mut options = mount_options(options)?;
    options.read_only |= usage == ImageUse::Read;
    let access = if options.read_only { Access::ReadOnly } else { Access::ReadWrite };
    let devices = open_devices(image, &options, access)?;
    with_shared_devices(image, devices, options, usage, work)
}

/// Opens an image or device, the devices that the option `device=` adds to it, and the other devices of its filesystem
/// that are found.
pub(crate) fn open_devices(
    first: &Path,
    options: &MountOptions,
    access: Access,
) -> anyhow::Result<Vec<Arc<dyn Device>>> {
    let given = given_devices(first, options);
    let paths = with_members(&given)?;
    let mut opened: Vec<Option<Arc<NamedDevice>>> = vec![None; paths.len()];
    for index in lock_order(&paths) {
        let path = &paths[index];
        let is_found = index >= given.len();
        let unusable = |error: &anyhow::Error| error.downcast_ref().is_some_and(OpenError::is_of_device);
        // Nothing is ever written to a seed, so others may use it at the same time.
        let access = if is_seed(path) { Access::ReadOnly } else { access };
        match open_device(path, access) {
            Ok(device) => opened[index] = Some(Arc::new(if is_found { device.found() } else { device })),
            Err(error) if is_found && options.degraded && unusable(&error) => {
                warn(&format!("{} is not used, and counts as missing: {error}", path.shown()));
            }
            Err(error) if is_forbidden(&error) => return Err(error),
            Err(error) if paths.len() > 1 && unusable(&error) => {
                bail!("{error}; to go on without this device, leave it out of the command, and use -o degraded")
            }
            Err(error) => return Err(error),
        }
    }
    let devices: Vec<Arc<NamedDevice>> = opened.into_iter().flatten().collect();
    refuse_foreign(&devices)?;
    Ok(devices.into_iter().map(|device| device as Arc<dyn Device>).collect())
}

/// Whether a device could not be opened, because the user may not read it, or not write it.
pub(crate) fn is_forbidden(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(OpenError::Permission { .. }))
}

/// The first device and those of the option `device=`. As on Linux, the option may name the first device again.
pub(crate) fn given_devices(first: &Path, options: &MountOptions) -> Vec<PathBuf> {
    let mut given = vec![first.to_owned()];
    for path in &options.devices {
        if !given.iter().any(|other| is_same_file(other, path)) {
            given.push(path.clone());
        }
    }
    given
}

/// The devices with which an image is opened, without a word about those that are left out.
pub(crate) fn members_of(first: &Path, options: &ImageOptions) -> anyhow::Result<Vec<PathBuf>> {
    let mut all = given_devices(first, &mount_options(options)?);
    let given: Vec<&Path> = all.iter().map(PathBuf::as_path).collect();
    let found = find_members(&given).map(|members| members.found).unwrap_or_default();
    all.extend(found);
    Ok(all)
}

/// The given devices, and the other devices of their filesystem that are found. Names on stderr the ones that are left out,
/// because they missed changes.
pub(crate) fn with_members(given: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    members_telling(given, MissedChanges::to_string)
}

/// Works like [`with_members`], with another text about devices that missed changes.
pub(crate) fn members_telling(
    given: &[PathBuf],
    missed: impl Fn(&MissedChanges) -> String,
) -> anyhow::Result<Vec<PathBuf>> {
    for path in given {
        await_server(path)?;
        refuse_names_of_others(path)?;
    }
    let paths: Vec<&Path> = given.iter().map(PathBuf::as_path).collect();
    let members = find_devices(&paths).context("cannot tell the devices of the filesystem apart")?;
    members.left_out.iter().for_each(|device| warn(&missed(device)));
    members.of_others.iter().for_each(|device| warn(&device.to_string()));
    Ok(given.iter().cloned().chain(members.found).collect())
}

/// Opens an image, a device, or an export of an NBD server. The error for an image that is in use names the process that
/// has it open, and where it is mounted. Fails if the path is in a mount whose server is stopped.
pub(crate) fn open_device(path: &Path, access: Access) -> anyhow::Result<NamedDevice> {
    await_server(path)?;
    if path.is_dir()
        && let Some(text) = misplaced(path, &path.shown())
    {
        bail!(text);
    }
    let opened = match find_device(path)? {
        Some(found) => NamedDevice::open_found(found, path, access),
        // The attempt only tells the reason, because nobody has checked a file that appears now.
        None => NamedDevice::open(path, access).and_then(|_| Err(OpenError::Missing { path: path.to_owned() })),
    };
    if let Ok(NamedDevice::Network(_)) = &opened
        && access == Access::ReadWrite
    {
        warn_of_other_clients(path);
    }
    opened.map_err(|error| match &error {
        OpenError::Locked { path, by: Some(by) } => match mount_of(path) {
            Some(dir) => {
                let dir = dir.shown();
                anyhow::anyhow!("{}; work in {dir}, or unmount it with: ubtrfs umount {dir}", in_use(&error))
            }
            None => match Channel::open_image(path, false).and_then(|channel| channel.image_work()) {
                Some(work) => anyhow::anyhow!("{} is in use by {by}, which {}", path.shown(), advice(work, path)),
                None => error.into(),
            },
        },
        OpenError::Missing { path } => match ImagePath::split(path.as_os_str()).filter(|at| at.image.is_file()) {
            Some(at) => {
                anyhow::anyhow!("{at} is a path in an image, and this command takes the image: {}", at.image.shown())
            }
            None => error.into(),
        },
        _ => error.into(),
    })
}

/// Says once that nothing protects an export that is opened for writing.
pub(crate) fn warn_of_other_clients(export: &Path) {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        warn(&format!(
            "note: nothing keeps clients on other machines from writing to {}; make sure that there are none",
            export.shown()
        ));
    });
}

/// Finds the file of an image or device, as [`find_own`]. `Some(None)` stands for a URL.
pub(crate) fn find_device(path: &Path) -> anyhow::Result<Option<Option<OwnedFd>>> {
    match is_url(path) {
        true => Ok(Some(None)),
        false => Ok(find_own(path)?.map(Some)),
    }
}

/// The directory where ubtrfs has mounted the filesystem of an image or device, which need not be the one that the table of
/// mounts names. No server is asked, because any one may be silent.
pub(crate) fn mount_of(device: &Path) -> Option<PathBuf> {
    let by_member =
        || find_members(&[device]).ok()?.found.iter().find_map(|member| ubtrfs_fuse::mount_point_of(member));
    ubtrfs_fuse::mount_point_of(device).or_else(by_member)
}

/// Tells which process uses a device that cannot be opened, and where it is mounted.
pub(crate) fn in_use(error: &OpenError) -> String {
    let (path, by) = match error {
        OpenError::Locked { path, by } => (path, by),
        OpenError::Served { path, at, .. } => return format!("{} is mounted on {}", path.shown(), at.shown()),
        OpenError::Mounted { path, at: Some(at), .. } => {
            return format!("{} is mounted by the kernel on {}", path.shown(), at.shown());
        }
        OpenError::Mounted { path, at: None, .. } => return format!("{} is in use by the kernel", path.shown()),
        _ => return error.to_string(),
    };
    let by = by.as_deref().unwrap_or("another process");
    match mount_of(path) {
        Some(dir) => format!("{} is in use by {by}, which has mounted it on {}", path.shown(), dir.shown()),
        None => format!("{} is in use by {by}", path.shown()),
    }
}

/// The error for a filesystem that cannot be opened or mounted, with the next step.
pub(crate) fn not_opened(verb: &str, image: &Path, cause: ubtrfs_fs::Error) -> anyhow::Error {
    let shown = image.shown();
    let text = cause.to_string();
    let text = match &cause {
        ubtrfs_fs::Error::Engine(ubtrfs_error::Error::Corrupt(_)) => {
            format!(
                "{text}; copy the image; to find the damage, run: ubtrfs check {shown}; to read what is left, use: -o ro,rescue=all"
            )
        }
        // The engine knows no paths of the host.
        _ if text.ends_with("ubtrfs subvolume list") => format!("{text} {shown}"),
        _ => text,
    };
    anyhow::Error::new(NotOpened { text, cause }).context(format!("cannot {verb} {shown}"))
}

/// An error of `fs` with advice.
#[derive(Debug)]
struct NotOpened {
    text: String,
    cause: ubtrfs_fs::Error,
}

impl fmt::Display for NotOpened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for NotOpened {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.cause)
    }
}

/// Names the work of the process that serves an image, and the commands that end it.
fn advice(work: ImageWork, image: &Path) -> String {
    let image = image.shown();
    match work {
        ImageWork::Balance => {
            format!("balances it; see: ubtrfs balance status {image}, or end it with: ubtrfs balance cancel {image}")
        }
        ImageWork::Resize => format!("resizes it; end it with: ubtrfs filesystem resize cancel {image}"),
        ImageWork::Removal => {
            format!("changes its devices; end a removal with: ubtrfs device remove cancel {image}")
        }
        ImageWork::Replacement => {
            format!(
                "replaces a device; see: ubtrfs replace status {image}, or end it with: ubtrfs replace cancel {image}"
            )
        }
        ImageWork::Scrub => {
            format!("scrubs it; see: ubtrfs scrub status {image}, or end it with: ubtrfs scrub cancel {image}")
        }
    }
}

/// Does the work on devices that are already open, and closes the filesystem (I1).
pub(crate) fn with_devices<T>(
    image: &Path,
    devices: Vec<Arc<dyn Device>>,
    options: MountOptions,
    usage: ImageUse,
    work: impl FnOnce(&Fs) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    with_shared_devices(image, devices, options, usage, |fs| work(fs))
}

fn with_shared_devices<T>(
    image: &Path,
    devices: Vec<Arc<dyn Device>>,
    options: MountOptions,
    usage: ImageUse,
    work: impl FnOnce(&Arc<Fs>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let rescue = options.rescue;
    if rescue != Rescue::default() {
        logging::as_warnings();
    }
    let fs = Fs::open(devices, options).map_err(|error| not_opened("open", image, error))?;
    if let Some(reason) = fs.read_only().filter(|_| rescue.use_backup_root) {
        warn(&format!("{} is read as it is left: {reason}", image.shown()));
    }
    device_notes(&fs).iter().for_each(|note| warn(note));
    let guard = CloseOnDrop(&fs);
    let worked = work_on(image, &fs, usage, work);
    drop(guard);
    let closed = fs.close().with_context(|| format!("cannot close {}", image.shown()));
    let done = worked?;
    closed?;
    Ok(done)
}

/// Does the work, unless it changes a filesystem that is read-only.
fn work_on<T>(
    image: &Path,
    fs: &Arc<Fs>,
    usage: ImageUse,
    work: impl FnOnce(&Arc<Fs>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    match fs.read_only() {
        Some(reason) if usage == ImageUse::Write => {
            Err(anyhow::anyhow!("{} cannot be changed: {reason}", image.shown()))
        }
        _ => work(fs),
    }
}

/// What users must know about the devices of a filesystem that was opened: the ones that are left out, and the ones that missed
/// changes, which are overwritten.
pub(crate) fn device_notes(fs: &Fs) -> Vec<String> {
    let (newest, devices) = fs.devices_at_open();
    let suspended = fs.suspended_replacement().filter(|suspended| !suspended.has_target);
    let suspended = suspended.map(|suspended| {
        format!(
            "the replacement of device {} is suspended, because its new device was not given: name it with -o device=PATH, or \
             end the replacement with: ubtrfs replace cancel",
            suspended.item.src_devid
        )
    });
    let note = |device: &DeviceSummary| match device.state {
        MemberState::Stale(generation) if fs.read_only().is_none() => Some(format!(
            "{} (device {}) missed changes: it has generation {generation}, and the newest is {newest}; it is brought up to date \
             in the background",
            device.path.as_deref().unwrap_or_default().shown(),
            device.devid
        )),
        _ => None,
    };
    fs.left_out().iter().cloned().chain(devices.iter().filter_map(note)).chain(suspended).collect()
}

/// Closes the filesystem when a panic unwinds. Without a panic, the filesystem is closed explicitly, so that errors are
/// reported.
struct CloseOnDrop<'a>(&'a Fs);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.0.close();
        }
    }
}

pub(crate) fn mount_options(options: &ImageOptions) -> anyhow::Result<MountOptions> {
    let mut parsed = MountOptions::parse(&options.options.join(","))?;
    if let Some(memory) = options.memory {
        parsed.memory_bytes = memory;
    }
    Ok(parsed)
}

/// Looks up a path of an image. Follows symbolic links on the way; a symbolic link at the end of the path is followed
/// only with `follow`.
pub(crate) fn lookup(fs: &Fs, at: &ImagePath, follow: bool) -> anyhow::Result<Attr> {
    fs.lookup_path(&at.path, follow).with_context(|| format!("{at}"))
}

/// Returns the directory that holds the last name of a path, and that name.
pub(crate) fn lookup_parent<'p>(fs: &Fs, at: &'p ImagePath) -> anyhow::Result<(InodeId, &'p [u8])> {
    let Some((dir, name)) = at.split_name() else {
        bail!("{at} is the image's root directory; name a file or directory in it");
    };
    let parent = ImagePath { image: at.image.clone(), path: dir };
    let attr = lookup(fs, &parent, true)?;
    if !attr.is_dir() {
        bail!("{parent} is not a directory");
    }
    Ok((attr.id, name))
}

/// Fails if a path ends in `.` or `..`, which name no entry of a directory.
pub(crate) fn refuse_dots(at: &ImagePath, verb: &str) -> anyhow::Result<()> {
    let last = at.path.split(|byte| *byte == b'/').rfind(|name| !name.is_empty());
    if matches!(last, Some(b"." | b"..")) {
        bail!("cannot {verb} {at}: it ends in '.' or '..'; name the file or directory itself");
    }
    Ok(())
}

/// Whether two paths of the host name one image.
fn is_same_image(one: &Path, other: &Path) -> bool {
    match (identity_of(one), identity_of(other)) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    }
}

/// Device and inode of a file of the host.
pub(crate) fn identity_of(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_split_into_directory_and_name() {
        let split = |path: &str| {
            let at = ImagePath { image: PathBuf::new(), path: path.as_bytes().to_vec() };
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
            at.split_name().map(|(dir, name)| (text(&dir), text(name)))
        };
        let some = |dir: &str, name: &str| Some((dir.to_owned(), name.to_owned()));
        assert_eq!(split("/a"), some("/", "a"));
        assert_eq!(split("/a/b//"), some("/a/", "b"));
        assert_eq!(split("/a/../b"), some("/a/../", "b"));
        assert_eq!(split("/a/b/.."), some("/", "a"));
        assert_eq!(split("/a/."), some("/", "a"));
        assert_eq!([split("/"), split("//"), split("/.."), split("/a/..")], [None, None, None, None]);
    }

    #[test]
    fn the_last_colon_and_slash_split_image_and_path() {
        let split = |text: &str| {
            ImagePath::split(OsStr::new(text))
                .map(|at| (at.image.display().to_string(), String::from_utf8(at.path).unwrap()))
        };
        let some = |image: &str, path: &str| Some((image.to_owned(), path.to_owned()));
        assert_eq!(split("a.img:/"), some("a.img", "/"));
        assert_eq!(split("a:b.img:/c/d"), some("a:b.img", "/c/d"));
        assert_eq!(split("/x:/y.img:/c"), some("/x:/y.img", "/c"));
        assert_eq!(split("a.img:"), None);
        assert_eq!(split(":/a"), None);
        assert_eq!(split("host/file"), None);
    }
}
