//! `ubtrfs import TAR|- IMAGE:/path`: unpacks an archive into an image, by [`ubtrfs_archive::import()`].

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ubtrfs_archive::{Archive, ArchiveMessage, ImportOptions, ImportReport};
use ubtrfs_device::{Device, is_url};
use ubtrfs_fs::Fs;

use super::held::refuse_change_of;
use super::text::printable;
use super::{ImageOptions, ImagePath, ImagePathParser, ImageUse, misplaced, mount_options, with_devices, with_image};
use crate::commands::place::await_server;
use crate::common::{Shown, calling_user, counted, format_size, parse_size, print_out, progress_bytes, warn};
use crate::interrupt;
use crate::new_image::NewImage;

/// Unpack a tar archive into an image, without a mount and without root
///
/// As with tar, files keep the archive's owners if root unpacks it; otherwise they belong to the current user.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Archive, plain or compressed with gzip, xz, zstd, bzip2 or lz4; - for standard input
    tar: PathBuf,
    /// Image and directory to unpack into, by default the root directory; a missing directory is made
    #[arg(value_name = "IMAGE[:/PATH]", value_parser = ImagePathParser { root_by_default: true })]
    target: ImagePath,
    /// Make and format the image if it does not exist, with this size in bytes or with K, M, G or T
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    create: Option<u64>,
    /// Remove this many leading names from each path
    #[arg(long, value_name = "N", default_value_t = 0)]
    strip_components: usize,
    /// Leave out members with these names, and everything below them: a name or several names with slashes, with
    /// patterns as in a shell. Can be given several times.
    #[arg(short = 'x', long, value_name = "PATTERN")]
    exclude: Vec<OsString>,
    /// Print the name of each member
    #[arg(short, long, conflicts_with = "json")]
    verbose: bool,
    /// Numeric user and group that own every file
    #[arg(long, value_name = "UID:GID", value_parser = parse_owner)]
    owner: Option<(u32, u32)>,
    /// Keep the archive's owners: the default for root; for other users, files belong to the current user by default
    #[arg(long, conflicts_with = "owner")]
    same_owner: bool,
    /// The archive is a layer of an OCI image: apply its whiteouts (.wh.NAME, .wh..wh..opq) to the existing files
    #[arg(long)]
    oci_layer: bool,
    /// Print a summary as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

pub(crate) fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    if !args.same_owner && !rustix::process::geteuid().is_root() {
        args.owner.get_or_insert_with(calling_user);
    }
    if let Some(at) = ImagePath::split(args.tar.as_os_str()).filter(|at| !args.tar.exists() && at.image.is_file()) {
        bail!("{at} is in an image, and the archive is named first: ubtrfs import {} {at}", args.target.image.shown());
    }
    await_server(&args.target.image)?;
    if !args.target.image.is_file()
        && let Some(text) = misplaced(&args.target.image, &args.target.image.shown())
    {
        bail!("{text}");
    }
    let started = Instant::now();
    // Start reading the archive before the image is made, so that an unreadable archive does not leave a new image.
    let mut archive = open(&args.tar)?;
    let progress = progress_bytes(archive.total_bytes(), "import");
    let options = ImportOptions {
        strip_components: args.strip_components,
        owner: args.owner,
        dir_owner: calling_user(),
        oci_layer: args.oci_layer,
        exclude: args.exclude.iter().map(|pattern| pattern.as_bytes().to_vec()).collect(),
        place: format!("{}:", args.target.image.shown()),
    };
    let watch = |event: ArchiveMessage<'_>| match event {
        ArchiveMessage::Bytes(bytes) => progress.set_position(bytes),
        ArchiveMessage::Failed(error) => warn(&format!("{error:#}")),
        ArchiveMessage::Member(path) if args.verbose => progress.suspend(|| print_member(path)),
        ArchiveMessage::Member(_) | ArchiveMessage::Socket(_) => {}
    };
    let work = |fs: &Fs| {
        let report = ubtrfs_archive::import(fs, &mut archive, &args.target.path, &options, &watch)?;
        progress.set_message("commit");
        Ok(report)
    };
    let image = &args.target.image;
    refuse_change_of(image)?;
    let counts = match args.create.filter(|_| !is_url(image) && !image.exists()) {
        // Remove a new image if the import fails, because part of an archive is useless.
        Some(size) => NewImage::create(image, size).and_then(|made| {
            let options = mount_options(&args.image)?;
            let device: Arc<dyn Device> = Arc::clone(made.device()) as Arc<dyn Device>;
            ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default())
                .with_context(|| format!("cannot format {}", image.shown()))?;
            let counts = with_devices(image, vec![device], options, ImageUse::Write, work)?;
            made.keep()?;
            Ok(counts)
        }),
        None => {
            interrupt::set_left(Some(format!(
                "interrupted: {} has only a part of the archive, and the last files may be empty; import it again, or remove them",
                args.target
            )));
            let counts = with_image(image, &args.image, ImageUse::Write, work);
            interrupt::set_left(None);
            counts
        }
    };
    progress.finish_and_clear();
    let counts = counts?;
    print_out(&summary(&counts, started.elapsed(), args.json))?;
    Ok(if counts.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub(crate) fn parse_owner(text: &str) -> Result<(u32, u32), String> {
    // The highest number is not an id, because it means "do not change" to chown(2).
    let id = |text: &str| text.parse().ok().filter(|id| *id != u32::MAX);
    let parsed = text.split_once(':').and_then(|(uid, gid)| Some((id(uid)?, id(gid)?)));
    parsed.ok_or_else(|| format!("'{text}' is not an owner; write two numbers, for example 0:0"))
}

/// Opens the archive, or standard input for `-`.
fn open(path: &Path) -> anyhow::Result<Archive> {
    if path != Path::new("-") {
        return Archive::open(path);
    }
    if ubtrfs_device::stdin_was_closed() {
        bail!("standard input is closed; give an archive or a pipe");
    }
    Archive::from_reader(io::stdin(), path)
}

/// Prints the name of a member. An error is reported when the summary is printed.
fn print_member(path: &[u8]) {
    let _ = print_out(&format!("{}\n", printable(path)));
}

fn summary(report: &ImportReport, elapsed: Duration, json: bool) -> String {
    let seconds = elapsed.as_secs_f64();
    if json {
        let mut value = serde_json::to_value(report).unwrap_or_default();
        value["seconds"] = seconds.into();
        return format!("{value}\n");
    }
    let rate = format_size((report.bytes as f64 / seconds.max(1e-9)) as u64);
    let bytes = format_size(report.bytes);
    let failed = if report.failed == 0 { String::new() } else { format!("; {} failed", report.failed) };
    let entries = counted(report.entries, "entry", "entries");
    format!("imported {entries}, {bytes} in {seconds:.2} s ({rate}/s){failed}\n")
}
