//! `ubtrfs export IMAGE:/path`: writes a directory or file of an image as a tar archive, by
//! [`ubtrfs_archive::export()`].
//!
//! The exit status is 1 if files are missing in the archive or incomplete.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use ubtrfs_archive::host_file::HostFile;
use ubtrfs_archive::{ArchiveCompression, ArchiveMessage, Compressor, ExportOptions};
use ubtrfs_fs::{Attr, Fs, MountOptions};

use super::text::printable;
use super::{ImageOptions, ImagePath, ImagePathParser, ImageUse, lookup, with_image};
use crate::common::{Shown, print_error, progress_bytes, stdout, warn};

/// Write a directory of an image as a tar archive
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Image and directory or file in it
    #[arg(value_name = "IMAGE[:/PATH]", value_parser = ImagePathParser { root_by_default: true })]
    source: ImagePath,
    /// File to write instead of standard output; the suffix (.tar.gz, .tar.xz, .tar.zst, .tar.bz2, .tar.lz4) selects the
    /// compression
    #[arg(short = 'f', long = "output", visible_alias = "file", value_name = "FILE")]
    output: Option<PathBuf>,
    /// Mount options, such as subvol=home; any other value is taken as --output
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    options: Vec<OsString>,
    /// Keep holes of files as holes (pax sparse format 1.0)
    #[arg(short = 'S', long)]
    sparse: bool,
    /// Omit extended attributes and ACLs
    #[arg(long)]
    no_xattrs: bool,
}

impl Args {
    /// Separates the values of `-o` into mount options and a file name. `-o` was once short for `--output`, so file
    /// names are still recognized.
    fn sort_options(&mut self) -> anyhow::Result<ImageOptions> {
        let mut options = Vec::new();
        for value in std::mem::take(&mut self.options) {
            match value.to_str().filter(|text| text.contains('=') || MountOptions::parse(text).is_ok()) {
                Some(text) => options.push(text.to_owned()),
                None if self.output.is_none() => self.output = Some(value.into()),
                None => bail!("'{}' is not a mount option, and --output already names the file", value.shown()),
            }
        }
        Ok(ImageOptions { options, memory: None })
    }
}

pub(crate) fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let options = args.sort_options()?;
    // As in tar, `-` means standard output.
    args.output.take_if(|path| path.as_os_str() == "-");
    if args.output.is_none() && stdout().is_terminal() {
        bail!("refusing to write an archive to a terminal; write it to a file with --output, or to a pipe");
    }
    with_image(&args.source.image, &options, ImageUse::Read, |fs| {
        let start = lookup(fs, &args.source, true)?;
        match &args.output {
            Some(path) => {
                let compression = ArchiveCompression::of(path)?;
                let at = || format!("cannot write {}", path.shown());
                let file = Compressor::new(HostFile::named(path, 0o666)?, compression).with_context(at)?;
                let (file, status) = export(fs, &args, &start, file).with_context(|| path.shown())?;
                let file = file.finish().with_context(at)?;
                file.sync().and_then(|()| file.keep()).with_context(at)?;
                Ok(status)
            }
            None => export(fs, &args, &start, stdout())
                .map(|(_, status)| status)
                .context("cannot export to standard output"),
        }
    })
}

/// Writes the archive to `out`. Returns `out` and the command's exit status.
fn export<W: Write>(fs: &Fs, args: &Args, start: &Attr, out: W) -> anyhow::Result<(W, ExitCode)> {
    let progress = progress_bytes(None, "export");
    let watch = |event: ArchiveMessage<'_>| match event {
        ArchiveMessage::Bytes(bytes) => progress.set_position(bytes),
        ArchiveMessage::Failed(error) => drop(print_error(error)),
        ArchiveMessage::Member(_) => {}
        ArchiveMessage::Socket(path) => {
            warn(&format!("{}: omitted, because tar cannot store sockets", printable(path)))
        }
    };
    let options = ExportOptions { sparse: args.sparse, no_xattrs: args.no_xattrs };
    let names = args.source.names();
    let name = names.last().copied().unwrap_or(b"file");
    let (out, report) = ubtrfs_archive::export(fs, start, name, out, &options, &watch)?;
    progress.finish_and_clear();
    Ok((out, if report.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }))
}
