//! `ubtrfs mkfs`: makes a filesystem on image files or block devices. Options have the names of mkfs.btrfs.
//!
//! Invariants:
//! - I1. After an error, a file that was empty is empty again. A new image file has a temporary name until it is
//!   complete, and is removed after an error.
//! - I2. Superblocks are written last, after the directory is copied (`ubtrfs_mkfs::UnfinishedDevice`). So a run with
//!   `--force` that fails or is interrupted while it writes leaves no filesystem on the devices, neither the new
//!   nor the old one. Nothing is written before all devices are open and locked.
//! - I3. A file that cannot be copied is reported, and all other files are copied. The filesystem is then completed
//!   without this file, but the exit status is 1.
//! - I4. The size of a shrunk filesystem depends on the directory, and not on the size that the image had before.

use std::ffi::OsString;
use std::fs::Metadata;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use ubtrfs_archive::copy::{
    CopiedSubvolume, CopyMessage, CopyOptions, IdRange, NewFlags, OwnerMap, UnmappedOwner, copy_from_host,
};
use ubtrfs_device::{Access, Device, NamedDevice, is_url};
use ubtrfs_format::clock::new_uuid;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::print::insert_name;
use ubtrfs_format::superblock::{CompatRo, Incompat};
use ubtrfs_format::{CsumType, Profile};
use ubtrfs_fs::{Caller, Fs, Job, MountOptions, QuotaKind, SetAttr};
use ubtrfs_mkfs::{BlockGroupReport, MkfsOptions, MkfsReport, UnfinishedDevice};
use uuid::Uuid;

use super::filesystem::shrink_image;
use super::inspect;
use super::offline::copy::{image_of, printer};
use super::offline::fill_options::{check_flags, check_subvolumes, parse_flags, parse_range, parse_subvolume};
use super::offline::import::parse_owner;
use super::offline::text::printable;
use super::offline::{ImageUse, identity_of, open_device, with_devices};
use crate::common::{Shown, calling_user, format_size, parse_size, print_json, print_out, warn};
use crate::new_image::NewImage;

/// Make a btrfs filesystem on image files or block devices.
#[derive(clap::Args)]
#[command(disable_version_flag = true)]
pub(crate) struct Args {
    /// The image files, block devices or NBD exports. A missing file is made if --byte-count gives its size.
    #[arg(value_name = "DEVICE")]
    devices: Vec<PathBuf>,
    /// Label, at most 255 bytes.
    #[arg(short = 'L', long, value_name = "LABEL")]
    label: Option<OsString>,
    /// Filesystem id; a random one by default.
    #[arg(short = 'U', long, value_name = "UUID")]
    uuid: Option<Uuid>,
    /// Device id, for a filesystem on one device; by default it is made from the filesystem id.
    #[arg(long, value_name = "UUID")]
    device_uuid: Option<Uuid>,
    /// Bytes of each device to use, also with K, M, G or T, and the size of a new image file; the whole device by default.
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = parse_size)]
    byte_count: Option<u64>,
    /// Bytes of a tree block: 4K to 64K; 16K by default.
    #[arg(short = 'n', long, value_name = "SIZE", value_parser = parse_size)]
    nodesize: Option<u64>,
    /// Bytes of a data block: 4K (default) to 64K.
    #[arg(short = 's', long, value_name = "SIZE", value_parser = parse_size)]
    sectorsize: Option<u64>,
    /// Checksums: crc32c (default), xxhash, sha256 or blake2.
    #[arg(long, alias = "checksum", value_name = "TYPE", value_parser = parse_csum)]
    csum: Option<CsumType>,
    /// Profile of data: single (default), dup, raid0, raid1, raid1c3, raid1c4 or raid10.
    #[arg(short = 'd', long, value_name = "PROFILE", value_parser = parse_profile)]
    data: Option<BlockGroupFlags>,
    /// Profile of metadata, of the same names: dup by default, raid1 on several devices.
    #[arg(short = 'm', long, value_name = "PROFILE", value_parser = parse_profile)]
    metadata: Option<BlockGroupFlags>,
    /// Keep data and metadata in the same block groups; separate block groups by default.
    #[arg(short = 'M', long)]
    mixed: bool,
    /// Features to set, or with a leading ^ to leave out, separated by commas; `-O list-all` lists the features.
    #[arg(short = 'O', long, value_name = "LIST", value_delimiter = ',', allow_hyphen_values = true)]
    features: Vec<String>,
    /// Same as --features.
    #[arg(short = 'R', long, value_name = "LIST", value_delimiter = ',')]
    runtime_features: Vec<String>,
    /// Copy the content of this directory into the new filesystem. A missing image is made large enough if --byte-count
    /// is not given.
    #[arg(short = 'r', long, value_name = "DIR")]
    rootdir: Option<PathBuf>,
    /// With --rootdir, make this directory a subvolume: [TYPE:]PATH, where TYPE is rw (default), ro, default or
    /// default-ro. Can be given several times.
    #[arg(short = 'u', long = "subvol", value_name = "[TYPE:]PATH", value_parser = parse_subvolume, requires = "rootdir")]
    subvolumes: Vec<CopiedSubvolume>,
    /// With --rootdir, set flags of a file, or of all files below a directory: nodatacow, or nodatasum. Can be given
    /// several times.
    #[arg(long, value_name = "FLAGS:PATH", value_parser = parse_flags, requires = "rootdir")]
    inode_flags: Vec<NewFlags>,
    /// With --rootdir, the owner of all files.
    #[arg(long, value_name = "UID:GID", value_parser = parse_owner, requires = "rootdir",
        conflicts_with_all = ["map_users", "map_groups"])]
    owner: Option<(u32, u32)>,
    /// With --rootdir, renumber COUNT users: the user FROM becomes TO, and so on. Can be given several times. Files of other
    /// users are not copied then.
    #[arg(long, value_name = "FROM:TO:COUNT", value_parser = parse_range, requires = "rootdir")]
    map_users: Vec<IdRange>,
    /// With --rootdir, renumber groups as --map-users renumbers users. Can be given several times.
    #[arg(long, value_name = "FROM:TO:COUNT", value_parser = parse_range, requires = "rootdir")]
    map_groups: Vec<IdRange>,
    /// With --rootdir, compress files: zstd, zlib, lzo or no, with an optional level, as in zstd:9.
    #[arg(long, value_name = "ALGO[:LEVEL]", value_parser = parse_compression, requires = "rootdir")]
    compress: Option<MountOptions>,
    /// With --rootdir, make the filesystem and its image file as small as they can be. --byte-count is then the largest
    /// size that they may have.
    #[arg(long, requires = "rootdir")]
    shrink: bool,
    /// Owner of the root directory: the current user, or the owner of --rootdir, by default.
    #[arg(long, value_name = "UID:GID", value_parser = parse_owner)]
    root_owner: Option<(u32, u32)>,
    /// Overwrite the content of the devices.
    #[arg(short, long)]
    force: bool,
    /// Do not discard the content of the devices first.
    #[arg(short = 'K', long)]
    nodiscard: bool,
    /// Print only errors.
    #[arg(short, long)]
    quiet: bool,
    /// Print the result as JSON.
    #[arg(long, conflicts_with = "quiet")]
    json: bool,
}

/// Makes the filesystem.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.all_features().any(|name| name == "list-all") {
        print_out(&features_text())?;
        return Ok(ExitCode::SUCCESS);
    }
    let path = args.devices.first().context("no device was given; name an image file or block device")?;
    refuse_repeated(&args.devices)?;
    let mut options = args.options()?;
    let quotas = args.quotas()?;
    let size = match (&args.rootdir, args.byte_count) {
        (Some(_), _) if args.devices.len() > 1 => {
            bail!(
                "--rootdir works with one device; make the filesystem without it, then copy the directory into the mount"
            )
        }
        (Some(dir), _) if !is_dir(dir)? => bail!("{} is not a directory; nothing was made", dir.shown()),
        // I4.
        (Some(dir), _) if args.shrink => Some(room_for(dir)),
        (Some(dir), None) if !is_url(path) && !path.exists() => Some(room_for(dir)),
        (_, size) => size,
    };
    if let Some(dir) = &args.rootdir {
        if args.root_owner.is_none() {
            // The copy has the owner of the directory.
            let meta = std::fs::metadata(dir).with_context(|| format!("cannot read {}", dir.shown()))?;
            options.root_owner = (meta.uid(), meta.gid());
        }
        refuse_inside(path, dir)?;
        check_subvolumes(&args.subvolumes, dir)?;
        check_flags(&args.inode_flags, dir)?;
    }
    let mut targets = Vec::new();
    for path in &args.devices {
        match MkfsTarget::open(path, size) {
            Ok(target) => targets.push(target),
            Err(error) => {
                targets.into_iter().for_each(MkfsTarget::restore);
                return Err(error);
            }
        }
    }
    if args.shrink {
        options.size_bytes = size.map(|size| size.min(targets[0].device().len_bytes()));
    }
    let devices: Vec<Arc<UnfinishedDevice>> =
        targets.iter().map(|target| Arc::new(UnfinishedDevice::new(target.device()))).collect();
    let refs: Vec<&dyn Device> = devices.iter().map(|device| &**device as &dyn Device).collect();
    let made = ubtrfs_mkfs::make_array(&refs, &options).map_err(anyhow::Error::from);
    let was_wiped = made.is_ok();
    let filled = made.and_then(|report| {
        if let Some(kind) = quotas {
            enable_quotas(targets[0].named_path(), &devices, kind)?;
        }
        let fill_from = |dir: &PathBuf| fill(&args, &targets[0], devices[0].clone(), dir);
        let nr_failed = args.rootdir.as_ref().map_or(Ok(0), fill_from)?;
        UnfinishedDevice::finish(&devices)?;
        Ok((report, nr_failed))
    });
    drop(devices);
    let (report, nr_failed) = match filled {
        Ok((mut report, nr_failed)) => {
            let was_missing = matches!(&targets[..], [MkfsTarget::Missing(_)]);
            let was_empty = matches!(&targets[..], [MkfsTarget::Empty { .. }]);
            targets.into_iter().try_for_each(MkfsTarget::keep)?;
            if args.shrink {
                shrink_image(path).with_context(|| format!("{} is made, but it was not shrunk", path.shown()))?;
                report = shrunk(path, report)?;
                if let Some(limit) = args.byte_count.filter(|limit| *limit < report.total_bytes) {
                    // I1. Errors are ignored, because the error that follows is reported.
                    if was_missing {
                        let _ = std::fs::remove_file(path);
                    } else if was_empty {
                        let _ = open_device(path, Access::ReadWrite).map(|mut device| device.resize(0));
                    }
                    let (needed, limit) = (report.total_bytes, format_size(limit));
                    bail!("{} needs {needed} bytes, and -b gives {limit}; give more", path.shown());
                }
            }
            (report, nr_failed)
        }
        Err(error) => {
            let is_lost = |target: &&MkfsTarget| was_wiped && matches!(target, MkfsTarget::Content { .. });
            let lost: Vec<String> =
                targets.iter().filter(is_lost).map(|target| target.named_path().shown().to_string()).collect();
            let error = match lost.len() {
                0 => error,
                1 => error.context(format!("{} no longer contains a filesystem", lost[0])),
                _ => error.context(format!("{} no longer contain a filesystem", lost.join(", "))),
            };
            targets.into_iter().for_each(MkfsTarget::restore);
            return Err(error);
        }
    };
    if args.json {
        let mut value = json((&options, quotas), &report, &args.devices);
        value["not_copied"] = nr_failed.into();
        print_json(&value)?;
    } else if !args.quiet {
        print_out(&summary((&options, quotas), &report, &args.devices))?;
    }
    if nr_failed > 0 {
        let files = if nr_failed == 1 { "1 file was" } else { &format!("{nr_failed} files were") };
        warn(&format!("{files} not copied; all other files are in {}", path.shown()));
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// The properties of a filesystem on one device after it was shrunk.
fn shrunk(path: &Path, before: MkfsReport) -> anyhow::Result<MkfsReport> {
    let (total_bytes, chunks) = inspect::chunks(path)?;
    let group = |(flags, start, len_bytes)| BlockGroupReport { flags, start, len_bytes };
    let block_groups = chunks.into_iter().map(group).collect();
    Ok(MkfsReport { total_bytes, device_bytes: vec![total_bytes], block_groups, ..before })
}

/// Fails if two paths name one file or block device.
fn refuse_repeated(paths: &[PathBuf]) -> anyhow::Result<()> {
    for (index, path) in paths.iter().enumerate() {
        let is_same = |other: &&PathBuf| match (std::fs::metadata(other), std::fs::metadata(path)) {
            (Ok(other), Ok(own)) => is_one_device(&other, &own),
            _ => other == &path,
        };
        if let Some(other) = paths[..index].iter().find(is_same) {
            match other == path {
                true => bail!("{} was given twice; name each device once", path.shown()),
                false => bail!("{} and {} are one device; name each device once", other.shown(), path.shown()),
            }
        }
    }
    Ok(())
}

fn is_one_device(a: &Metadata, b: &Metadata) -> bool {
    let is_block = |metadata: &Metadata| metadata.file_type().is_block_device();
    match is_block(a) && is_block(b) {
        true => a.rdev() == b.rdev(),
        false => (a.dev(), a.ino()) == (b.dev(), b.ino()),
    }
}

fn is_dir(path: &Path) -> anyhow::Result<bool> {
    match std::fs::metadata(path) {
        Ok(metadata) => Ok(metadata.is_dir()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.shown())),
    }
}

/// Fails for an image inside the directory: an image cannot contain itself.
fn refuse_inside(image: &Path, dir: &Path) -> anyhow::Result<()> {
    let in_dir = image.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if is_url(image) {
        return Ok(());
    }
    let place = image.canonicalize().or_else(|_| in_dir.canonicalize());
    if let (Ok(place), Ok(dir)) = (place, dir.canonicalize())
        && place.starts_with(&dir)
    {
        bail!(
            "{} is inside {}, the directory to copy; choose a place outside for the image",
            image.shown(),
            dir.shown()
        );
    }
    Ok(())
}

/// The opened target. Each variant is a state that the target can have before this run.
enum MkfsTarget {
    Missing(NewImage),
    /// An empty file.
    Empty {
        device: Arc<NamedDevice>,
        path: PathBuf,
    },
    Content {
        device: Arc<NamedDevice>,
        path: PathBuf,
    },
}

impl MkfsTarget {
    /// Opens the target. If the size is given, creates a missing file and enlarges an empty one.
    fn open(path: &Path, byte_count: Option<u64>) -> anyhow::Result<Self> {
        if let Some(size) = byte_count
            && !is_url(path)
            && !path.exists()
        {
            return Ok(Self::Missing(NewImage::create(path, size)?));
        }
        if !is_url(path)
            && std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
        {
            bail!("{} does not exist; check the path, or give the size of a new image file: -b SIZE", path.shown());
        }
        let mut device = open_device(path, Access::ReadWrite)?;
        let path = path.to_owned();
        if device.len_bytes() > 0 {
            return Ok(Self::Content { device: Arc::new(device), path });
        }
        let Some(size) = byte_count else { bail!("{} is empty; give its size with -b", path.shown()) };
        device.resize(size)?;
        Ok(Self::Empty { device: Arc::new(device), path })
    }

    fn device(&self) -> Arc<dyn Device> {
        match self {
            Self::Missing(image) => Arc::clone(image.device()) as Arc<dyn Device>,
            Self::Empty { device, .. } | Self::Content { device, .. } => Arc::clone(device) as Arc<dyn Device>,
        }
    }

    /// The target's current path.
    fn path(&self) -> &Path {
        match self {
            Self::Missing(image) => image.temporary(),
            Self::Empty { path, .. } | Self::Content { path, .. } => path,
        }
    }

    /// The path that the user named.
    fn named_path(&self) -> &Path {
        match self {
            Self::Missing(image) => image.path(),
            Self::Empty { path, .. } | Self::Content { path, .. } => path,
        }
    }

    fn keep(self) -> anyhow::Result<()> {
        match self {
            Self::Missing(image) => image.keep(),
            Self::Empty { .. } | Self::Content { .. } => Ok(()),
        }
    }

    /// Empties a target that was an empty file, and removes a new image (I1). Other targets stay as they are (I2).
    /// Errors are ignored, because the error that led to this call is reported.
    fn restore(self) {
        if let Self::Empty { device, .. } = self
            && let Some(mut device) = Arc::into_inner(device)
        {
            let _ = device.resize(0);
        }
    }
}

/// Enables quotas in the new filesystem, which has no files yet.
fn enable_quotas(image: &Path, devices: &[Arc<UnfinishedDevice>], kind: QuotaKind) -> anyhow::Result<()> {
    let devices = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    let work = |fs: &Fs| {
        fs.enable_quotas(kind)?;
        Ok::<_, anyhow::Error>(fs.wait_for_quota_rescan(&Job::new())?)
    };
    let work = |fs: &Fs| work(fs).context("cannot turn quotas on");
    with_devices(image, devices, MountOptions::default(), ImageUse::Write, work)
}

/// Copies a directory into the new filesystem, and returns the number of files that were not copied (I3).
fn fill(args: &Args, target: &MkfsTarget, device: Arc<dyn Device>, dir: &Path) -> anyhow::Result<u64> {
    let fill = |fs: &Fs| {
        let owners = OwnerMap { users: args.map_users.clone(), groups: args.map_groups.clone() };
        let options = CopyOptions { owner: args.owner, owners, ..CopyOptions::default() };
        // A new image has a temporary path, and messages name the final one.
        let image = image_of(fs, target.named_path()).with_new(&args.subvolumes, &args.inode_flags);
        let own_files: Vec<(u64, u64)> = identity_of(target.path()).into_iter().collect();
        let print = printer();
        let watch = |message: CopyMessage<'_>| match message {
            CopyMessage::Failed(error) => match without_range(error) {
                Some(error) => print(CopyMessage::Failed(&error)),
                None => print(message),
            },
            message => print(message),
        };
        let report = copy_from_host(dir, &image, b"/", &own_files, &options, &watch)?;
        if let Some((uid, gid)) = args.root_owner {
            let owner = SetAttr { uid: Some(uid), gid: Some(gid), ..SetAttr::default() };
            fs.setattr(fs.root(), &owner, &Caller::ROOT)?;
        }
        Ok::<_, anyhow::Error>(report.failed)
    };
    let work = |fs: &Fs| {
        let filled = fill(fs).with_context(|| format!("cannot copy {}", dir.shown()));
        filled.map_err(|error| match format!("{error:#}") {
            // The image is removed, so nothing can be resized.
            text if text.ends_with("no space left") => anyhow!("{text}; give a larger size with -b, or leave -b out"),
            _ => error,
        })
    };
    with_devices(target.named_path(), vec![device], args.compress.clone().unwrap_or_default(), ImageUse::Write, work)
}

/// The error for a file whose owner is in no range, with the name of the option; `None` for other errors.
fn without_range(error: &anyhow::Error) -> Option<anyhow::Error> {
    let text = match error.downcast_ref::<UnmappedOwner>()? {
        UnmappedOwner::User(uid) => format!("its user {uid} is in no range of --map-users"),
        UnmappedOwner::Group(gid) => format!("its group {gid} is in no range of --map-groups"),
    };
    Some(anyhow!(text).context(error.to_string()))
}

/// Parses the value of --compress into options for the copy.
fn parse_compression(text: &str) -> Result<MountOptions, String> {
    match text {
        "no" | "none" => Ok(MountOptions::default()),
        text => {
            let options = MountOptions::parse(&format!("compress={text}")).map_err(|error| error.to_string())?;
            // A mount brings levels into the range of the method. Here the user would not see which one was used.
            let level =
                text.split_once(':').and_then(|(_, level)| level.parse::<i32>().ok()).filter(|level| *level != 0);
            match options.compress {
                Some(used) if level.is_some_and(|level| level != used.level) => {
                    Err("levels are 1 to 9 for zlib, -15 to 15 for zstd, and none for lzo".to_owned())
                }
                _ => Ok(options),
            }
        }
    }
}

/// Returns a size with ample room for the directory's content. The image is sparse, so a large size costs nothing.
fn room_for(dir: &Path) -> u64 {
    const MIB: u64 = 1 << 20;
    let (mut data, mut nr_entries) = (0u64, 0u64);
    let mut todo = vec![dir.to_owned()];
    while let Some(dir) = todo.pop() {
        // Errors are ignored, because a directory that cannot be read is reported when it is copied.
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            nr_entries += 1;
            if metadata.is_dir() {
                todo.push(entry.path());
            } else if metadata.is_file() {
                // Count only blocks on disk, because holes stay holes.
                data += metadata.len().min(metadata.blocks() * 512).next_multiple_of(4096);
            }
        }
    }
    // Metadata consists of the items of each file, and of checksums (a 1024th of the data). With DUP, all metadata is
    // stored twice.
    let metadata = nr_entries * 4096 * 2 + data / 512;
    ((data + metadata) / 4 * 5 + 256 * MIB).next_multiple_of(MIB)
}

impl Args {
    fn all_features(&self) -> impl Iterator<Item = &str> {
        self.features.iter().chain(&self.runtime_features).map(|name| name.trim()).filter(|name| !name.is_empty())
    }

    /// The kind of quotas to enable.
    fn quotas(&self) -> anyhow::Result<Option<QuotaKind>> {
        let mut enabled = Vec::new();
        for name in self.all_features() {
            let plain = name.trim_start_matches('^');
            if let Some(Feature { bits: Bits::Quotas(kind), .. }) =
                FEATURES.iter().find(|feature| feature.name == plain)
            {
                enabled.retain(|other| other != kind);
                enabled.extend((plain == name).then_some(*kind));
            }
        }
        match enabled.as_slice() {
            [] => Ok(None),
            [kind] => Ok(Some(*kind)),
            _ => bail!("the features quota and squota exclude each other; give one of them"),
        }
    }

    fn options(&self) -> anyhow::Result<MkfsOptions> {
        let default = MkfsOptions::default();
        let (mut incompat, mut compat_ro) = (default.incompat, default.compat_ro);
        let mut mixed = self.mixed;
        for name in self.all_features() {
            let (is_set, plain) = match name.strip_prefix('^') {
                Some(plain) => (false, plain),
                None => (true, name),
            };
            let feature = FEATURES.iter().find(|feature| feature.name == plain);
            match feature.map(|feature| feature.bits) {
                Some(Bits::Mixed) => mixed = is_set,
                Some(Bits::Incompat(bits)) => incompat.set(bits, is_set),
                Some(Bits::CompatRo(bits)) => compat_ro.set(bits, is_set),
                Some(Bits::Quotas(_)) => {}
                None => bail!("feature '{plain}' is not supported; `-O list-all` lists the features"),
            }
        }
        let size = |given: Option<u64>, default: u32| match given {
            None => Ok(default),
            Some(size) => u32::try_from(size).with_context(|| format!("{size} is too large; give at most 64K")),
        };
        let sectorsize = size(self.sectorsize, default.sectorsize)?;
        let usual_nodesize = if mixed { sectorsize } else { default.nodesize.max(sectorsize) };
        let (data_profile, metadata_profile) = match mixed {
            // In mixed block groups, data and metadata share one profile, which `--data` or `--metadata` may set.
            true => {
                let given = self.metadata.or(self.data).unwrap_or(BlockGroupFlags::empty());
                (self.data.unwrap_or(given), given)
            }
            false => {
                let usual = match self.devices.len() > 1 {
                    true => MkfsOptions::default().with_array_profiles(),
                    false => MkfsOptions::default(),
                };
                (self.data.unwrap_or(usual.data_profile), self.metadata.unwrap_or(usual.metadata_profile))
            }
        };
        let fsid = self.uuid.unwrap_or(default.fsid);
        if self.device_uuid.is_some() && self.devices.len() > 1 {
            bail!("--device-uuid is for one device, and {} are named; leave it out", self.devices.len());
        }
        let device = |number: usize| self.device_uuid.unwrap_or_else(|| new_uuid(&fsid, &format!("device {number}")));
        Ok(MkfsOptions {
            device_uuids: (1..=self.devices.len()).map(device).collect(),
            chunk_tree_uuid: new_uuid(&fsid, "chunk tree"),
            subvol_uuid: new_uuid(&fsid, "subvolume 5"),
            label: self.label.clone().map(OsStringExt::into_vec).unwrap_or_default(),
            fsid,
            size_bytes: self.byte_count,
            nodesize: size(self.nodesize, usual_nodesize)?,
            sectorsize,
            csum_type: self.csum.unwrap_or(default.csum_type),
            data_profile,
            metadata_profile,
            mixed,
            incompat,
            compat_ro,
            root_owner: self.root_owner.unwrap_or_else(calling_user),
            force: self.force,
            discard: !self.nodiscard,
            ..default
        })
    }
}

#[derive(Clone, Copy)]
enum Bits {
    Mixed,
    Incompat(Incompat),
    CompatRo(CompatRo),
    /// Not a bit: quotas are enabled.
    Quotas(QuotaKind),
}

struct Feature {
    name: &'static str,
    bits: Bits,
    what: &'static str,
}

const FEATURES: [Feature; 8] = [
    Feature { name: "mixed-bg", bits: Bits::Mixed, what: "data and metadata in the same block groups" },
    Feature { name: "quota", bits: Bits::Quotas(QuotaKind::Full), what: "quotas, as after: quota enable" },
    Feature {
        name: "squota",
        bits: Bits::Quotas(QuotaKind::Simple),
        what: "simple quotas, as after: quota enable --simple",
    },
    Feature {
        name: "extref",
        bits: Bits::Incompat(Incompat::EXTENDED_IREF),
        what: "many hard links to a file in one directory (default)",
    },
    Feature {
        name: "skinny-metadata",
        bits: Bits::Incompat(Incompat::SKINNY_METADATA),
        what: "smaller extent items of tree blocks (default)",
    },
    Feature { name: "no-holes", bits: Bits::Incompat(Incompat::NO_HOLES), what: "no items for holes (default)" },
    Feature {
        name: "free-space-tree",
        bits: Bits::CompatRo(CompatRo::FREE_SPACE_TREE.union(CompatRo::FREE_SPACE_TREE_VALID)),
        what: "free space in a tree of its own (default)",
    },
    Feature {
        name: "block-group-tree",
        bits: Bits::CompatRo(CompatRo::BLOCK_GROUP_TREE),
        what: "block groups in a tree of their own: large filesystems mount faster",
    },
];

fn features_text() -> String {
    let mut text = String::from("Features that can be set, or left out with a leading ^:\n");
    for feature in &FEATURES {
        text.push_str(&format!("{:<20}- {}\n", feature.name, feature.what));
    }
    text
}

fn parse_csum(text: &str) -> Result<CsumType, String> {
    match text.to_ascii_lowercase().as_str() {
        "crc32c" | "crc32" => Ok(CsumType::Crc32c),
        "xxhash" | "xxhash64" => Ok(CsumType::Xxhash),
        "sha256" => Ok(CsumType::Sha256),
        "blake2" | "blake2b" => Ok(CsumType::Blake2),
        _ => Err("give crc32c, xxhash, sha256 or blake2".to_owned()),
    }
}

fn parse_profile(text: &str) -> Result<BlockGroupFlags, String> {
    const NAMES: &str = "single, dup, raid0, raid1, raid1c3, raid1c4 or raid10";
    match Profile::named(text) {
        Some(profile) if profile.has_parity() => Err(format!("the profile {text} cannot be written yet; give {NAMES}")),
        Some(profile) => Ok(profile.flag),
        None => Err(format!("give {NAMES}")),
    }
}

fn type_name(flags: BlockGroupFlags) -> &'static str {
    match flags.intersection(BlockGroupFlags::TYPES) {
        BlockGroupFlags::DATA => "Data",
        BlockGroupFlags::METADATA => "Metadata",
        BlockGroupFlags::SYSTEM => "System",
        _ => "Data+Metadata",
    }
}

/// Names of the filesystem's features.
fn feature_names(options: &MkfsOptions, quotas: Option<QuotaKind>) -> Vec<&'static str> {
    let is_set = |feature: &&Feature| match feature.bits {
        Bits::Mixed => options.mixed,
        Bits::Incompat(bits) => options.incompat.contains(bits),
        Bits::CompatRo(bits) => options.compat_ro.contains(bits),
        Bits::Quotas(kind) => quotas == Some(kind),
    };
    FEATURES.iter().filter(is_set).map(|feature| feature.name).collect()
}

/// A description of the new filesystem, in the format of mkfs.btrfs.
fn summary((options, quotas): (&MkfsOptions, Option<QuotaKind>), report: &MkfsReport, paths: &[PathBuf]) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        text.push_str(format!("{name:<20}{value}").trim_end());
        text.push('\n');
    };
    line("Label:", &label(options));
    line("UUID:", &options.fsid.to_string());
    line("Node size:", &options.nodesize.to_string());
    line("Sector size:", &options.sectorsize.to_string());
    line("Filesystem size:", &format_size(report.total_bytes));
    line("Block group profiles:", "");
    for name in ["Data", "Metadata", "Data+Metadata", "System"] {
        if let Some(group) = report.block_groups.iter().find(|group| type_name(group.flags) == name) {
            let profile = Profile::name_of(group.flags);
            line(&format!("  {name}:"), &format!("{profile:<9}{:>16}", format_size(group.len_bytes)));
        }
    }
    line("Features:", &feature_names(options, quotas).join(", "));
    line("Checksum:", options.csum_type.name());
    let (uid, gid) = options.root_owner;
    if options.root_owner != (0, 0) {
        line("Root directory:", &format!("owned by {uid}:{gid}"));
    }
    line("Number of devices:", &paths.len().to_string());
    line("Devices:", "");
    text.push_str("   ID        SIZE  PATH\n");
    for (devid, (size, path)) in (1..).zip(report.device_bytes.iter().zip(paths)) {
        text.push_str(&format!("{devid:>5}  {:>10}  {}\n", format_size(*size), path.shown()));
    }
    text
}

fn label(options: &MkfsOptions) -> String {
    if options.label.is_empty() { "(null)".to_owned() } else { printable(&options.label) }
}

fn json(
    (options, quotas): (&MkfsOptions, Option<QuotaKind>),
    report: &MkfsReport,
    paths: &[PathBuf],
) -> serde_json::Value {
    let groups: Vec<serde_json::Value> = report
        .block_groups
        .iter()
        .map(|group| {
            serde_json::json!({
                "type": type_name(group.flags),
                "profile": Profile::name_of(group.flags),
                "start": group.start,
                "length": group.len_bytes,
            })
        })
        .collect();
    let device = |(devid, (size, path)): (u64, (&u64, &PathBuf))| {
        let mut device = serde_json::json!({ "devid": devid, "size": size });
        insert_name(&mut device, "path", path.as_os_str().as_encoded_bytes());
        device
    };
    let devices: Vec<serde_json::Value> = (1..).zip(report.device_bytes.iter().zip(paths)).map(device).collect();
    let mut value = serde_json::json!({
        "uuid": options.fsid.to_string(),
        "nodesize": options.nodesize,
        "sectorsize": options.sectorsize,
        "total_bytes": report.total_bytes,
        "bytes_used": report.bytes_used,
        "checksum": options.csum_type.name(),
        "root_owner": { "uid": options.root_owner.0, "gid": options.root_owner.1 },
        "features": feature_names(options, quotas),
        "block_groups": groups,
        "devices": devices,
    });
    insert_name(&mut value, "label", &options.label);
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(args: &[&str]) -> Args {
        Cli::try_parse_from([&["mkfs"], args].concat()).unwrap().args
    }

    #[test]
    fn options_are_those_of_mkfs_btrfs() {
        let options =
            parse(&["-L", "home", "-b", "1G", "-n", "32K", "-d", "dup", "-O", "^no-holes,block-group-tree", "x"])
                .options()
                .unwrap();
        assert_eq!(options.label, b"home");
        assert_eq!((options.size_bytes, options.nodesize), (Some(1 << 30), 32768));
        assert_eq!(options.data_profile, BlockGroupFlags::DUP);
        assert!(!options.incompat.contains(Incompat::NO_HOLES));
        assert!(options.compat_ro.contains(CompatRo::BLOCK_GROUP_TREE));
        let mixed = parse(&["--mixed", "x"]).options().unwrap();
        assert_eq!((mixed.nodesize, mixed.metadata_profile), (4096, BlockGroupFlags::empty()));
        let large = parse(&["-s", "64K", "-R", "^free-space-tree", "x"]).options().unwrap();
        assert_eq!((large.nodesize, large.compat_ro), (65536, CompatRo::empty()));
        assert!(parse(&["-O", "zoned", "x"]).options().is_err());
        let quotas = |given: &str| parse(&["-O", given, "x"]).quotas().map_err(|error| error.to_string());
        assert_eq!(
            ["quota", "squota", "quota,^quota", "no-holes", "quota,^quota,squota"].map(quotas),
            [Ok(Some(QuotaKind::Full)), Ok(Some(QuotaKind::Simple)), Ok(None), Ok(None), Ok(Some(QuotaKind::Simple)),]
        );
        assert!(quotas("quota,squota").unwrap_err().contains("exclude each other"));
        let array = parse(&["x", "y"]).options().unwrap();
        assert_eq!((array.data_profile, array.metadata_profile), (BlockGroupFlags::empty(), BlockGroupFlags::RAID1));
        let array = parse(&["x", "y", "-d", "raid0", "-m", "RAID10"]).options().unwrap();
        assert_eq!((array.data_profile, array.metadata_profile), (BlockGroupFlags::RAID0, BlockGroupFlags::RAID10));
    }

    fn mkfs(args: &[&str]) -> anyhow::Result<ExitCode> {
        run(parse(args))
    }

    #[test]
    fn a_directory_is_copied_into_the_new_filesystem() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        std::fs::create_dir_all(source.join("a/b")).unwrap();
        std::fs::write(source.join("a/file"), vec![7; 300_000]).unwrap();
        std::fs::hard_link(source.join("a/file"), source.join("a/b/link")).unwrap();
        std::os::unix::fs::symlink("nowhere", source.join("symlink")).unwrap();
        let image = dir.path().join("image");
        let (image, source) = (image.to_str().unwrap(), source.to_str().unwrap());
        assert!(mkfs(&["-q", "--rootdir", image, image]).is_err());
        mkfs(&["-q", "--rootdir", source, image]).unwrap();
        let device = NamedDevice::open(Path::new(image), Access::ReadWrite).unwrap();
        let fs = Fs::open(vec![Arc::new(device)], MountOptions::default()).unwrap();
        let file = fs.lookup_path(b"/a/b/link", false).unwrap();
        assert_eq!((file.nlink, file.size), (2, 300_000));
        assert!(fs.read(file.id, 0, 300_000).unwrap() == vec![7; 300_000]);
        let link = fs.lookup_path(b"/symlink", false).unwrap();
        assert_eq!(fs.readlink(link.id).unwrap(), b"nowhere");
        fs.close().unwrap();
    }

    #[test]
    fn an_array_is_made_on_all_devices_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<String> =
            (1..=3).map(|n| dir.path().join(format!("d{n}")).to_str().unwrap().to_owned()).collect();
        let [a, b, c] = [&*paths[0], &*paths[1], &*paths[2]];
        let refused = |args: &[&str]| mkfs(args).unwrap_err().to_string();
        let error = refused(&["-q", "-b", "200M", "-m", "raid1c3", a, b]);
        assert!(error.contains("RAID1C3 of metadata needs 3 devices"), "{error}");
        assert!(!dir.path().join("d1").exists() && !dir.path().join("d2").exists());
        let error = refused(&["-q", "-b", "200M", a, a]);
        assert!(error.contains("was given twice"), "{error}");
        mkfs(&["-q", "-b", "200M", "-d", "raid0", "-m", "raid1c3", a, b, c]).unwrap();
        std::os::unix::fs::symlink(a, dir.path().join("link")).unwrap();
        let error = refused(&["-q", "-f", a, dir.path().join("link").to_str().unwrap()]);
        assert!(error.contains("are one device"), "{error}");
        let error = refused(&["-q", b, c]);
        assert!(error.contains("contains a btrfs filesystem"), "{error}");
        let error = refused(&["-q", "-f", "--rootdir", dir.path().to_str().unwrap(), b, c]);
        assert!(error.contains("--rootdir works with one device"), "{error}");
        let parsed = Cli::try_parse_from(["mkfs", "-d", "raid6", a]).err().map(|error| error.to_string());
        assert!(parsed.is_some_and(|text| text.contains("raid6 cannot be written yet")));
    }

    #[test]
    fn a_missing_image_is_made_and_kept_only_on_success() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let name = path.to_str().unwrap();
        assert!(mkfs(&["-q", name]).unwrap_err().to_string().contains("-b SIZE"));
        assert!(mkfs(&["-q", "-b", "1M", name]).is_err());
        assert!(!path.exists());
        mkfs(&["-q", "-b", "200M", name]).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 200 << 20);
        let refused = mkfs(&["-q", name]).unwrap_err().to_string();
        assert!(refused.contains("contains a btrfs filesystem") && refused.contains("-f"), "{refused}");
        mkfs(&["-q", "-f", "--csum", "xxhash", name]).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(mkfs(&["-q", "-b", "1M", name]).is_err());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        mkfs(&["-q", "-b", "200M", name]).unwrap();
    }
}
