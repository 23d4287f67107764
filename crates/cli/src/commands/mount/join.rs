//! A further mount of an image whose filesystem is mounted already: another subvolume, or the same one elsewhere, with flags
//! of its own.
//!
//! J1. This process mounts, and the server only says where the subvolume lies: a confined server cannot mount.
//! J2. Only root can mount so, and only beside root's mounts. In every other case, opening the image fails, and the error
//!     says where it is mounted.
//! J3. The options that concern the whole filesystem are those of the first mount. Another value is refused by name.

use std::path::Path;

use anyhow::{Context, anyhow, bail};
use ubtrfs_control::resolve::PathBytes;
use ubtrfs_control::{Channel, Request, Response, filesystem, join};
use ubtrfs_format::print::escaped;
use ubtrfs_fs::MountOptions;
use ubtrfs_fuse::{FirstMount, MountConfig};

use super::options::{self, Trust};
use super::{Args, await_server, given};
use crate::commands::servers_of::ServersOf;
use crate::common::{Shown, warn};

/// Mounts the subvolume beside a mount of the image. Returns false if there is none that this user may use (J2).
pub(super) fn join(args: &Args, dir: &Path, config: &mut MountConfig, options: &MountOptions) -> anyhow::Result<bool> {
    let found = MountedImage::of_image(&args.device).filter(|found| ubtrfs_fuse::is_root() && found.first.is_of_root());
    let Some(found) = found else { return Ok(false) };
    found.mount_beside(args, dir, config, options)?;
    Ok(true)
}

/// Whether exactly the wanted subvolume of the image is what is mounted on the directory.
pub(super) fn is_there(args: &Args, options: &MountOptions) -> bool {
    let Some(top) = FirstMount::on(&args.dir).filter(|_| ubtrfs_fuse::is_root()) else { return false };
    let Some(found) = MountedImage::of_image(&args.device).filter(|found| found.first.is_of_root()) else {
        return false;
    };
    let path = found.channel.call(find(options), &[]);
    matches!(path, Ok(Response::Join(join::Response::Found(path))) if top.shows(&found.first, &path.path))
}

/// The request for the path of the wanted subvolume.
fn find(options: &MountOptions) -> Request {
    Request::Join(join::Request::Find {
        subvol: options.subvol.clone().map(PathBytes),
        subvolid: options.subvolid.map(|id| id.0),
    })
}

/// Completes the error for an image that cannot be opened, if root could have mounted it all the same.
pub(super) fn explained(error: anyhow::Error, device: &Path) -> anyhow::Error {
    match !ubtrfs_fuse::is_root() && MountedImage::of_image(device).is_some() {
        true => anyhow!("{error}; only root can mount another subvolume of it, beside a mount of root"),
        false => error,
    }
}

/// Whether another server has just mounted the image or is about to, so that [`join`] may succeed soon; or whether the
/// server of the last mount is ending, so that opening the image may succeed soon. It may have locked another device of the
/// filesystem only.
pub(super) fn may_succeed(device: &Path) -> bool {
    let others = ubtrfs_device::find_members(&[device]).map(|members| members.found).unwrap_or_default();
    let any = |is_so: fn(&Path) -> bool| is_so(device) || others.iter().any(|other| is_so(other));
    if any(ubtrfs_device::is_being_mounted) {
        return true;
    }
    match MountedImage::of_image(device) {
        Some(found) => found.first.is_of_root(),
        // A server that no mount leads to any more.
        None => any(ubtrfs_device::is_served_here),
    }
}

/// A mount of the image, and its server.
struct MountedImage {
    first: FirstMount,
    channel: Channel<'static>,
    server: u32,
}

impl MountedImage {
    /// Finds a mount whose server has the image open. The path of the image does not decide: another file may have it by now.
    fn of_image(device: &Path) -> Option<Self> {
        let servers = ServersOf::device(device);
        if !servers.are_known() {
            return None;
        }
        FirstMount::all(device).into_iter().find_map(|first| {
            await_server(first.dir()).ok()?;
            let channel = Channel::mount(first.dir()).ok()?;
            let server = channel.server().filter(|_| servers.include(&channel))?;
            Some(Self { first, channel, server })
        })
    }

    /// Whether the server is confined, because the image is not trusted. A confined server of root runs as another user. The
    /// kernel says so, not the server.
    fn is_confined(&self) -> bool {
        !ubtrfs_control::is_of_user(self.server, 0)
    }

    fn mount_beside(
        &self,
        args: &Args,
        dir: &Path,
        config: &mut MountConfig,
        options: &MountOptions,
    ) -> anyhow::Result<()> {
        let (device, at) = (args.device.shown(), self.first.dir().shown());
        let call =
            |request| self.channel.call(request, &[]).map_err(|failure| not_mounted(&failure.text, &device, &at));
        let unexpected = || anyhow!("{at}: unexpected answer of the server; unmount and mount with this ubtrfs");
        for (is_given, option) in [(args.foreground, "-f"), (args.timeline.is_some(), "--timeline")] {
            if is_given {
                bail!("{device} is mounted on {at}, whose server serves this mount too; omit {option}");
            }
        }
        let Response::Filesystem(filesystem::Response::MountOptions(of_first)) =
            call(Request::Filesystem(filesystem::Request::MountOptions))?
        else {
            return Err(unexpected());
        };
        options::share(&given(args), &of_first, &at, config)?;
        let Response::Join(join::Response::Found(found)) = call(find(options))? else { return Err(unexpected()) };
        if let Some(reason) = found.read_only.filter(|_| !config.read_only) {
            let reason = escaped(reason.as_bytes());
            if options::parse(&of_first)?.config.read_only {
                bail!(
                    "the filesystem of {at} is read-only ({reason}); mount with -o ro, or unmount {at} and mount again"
                );
            }
            // As the first mount, which was read-only for the same reason.
            warn(&format!("{device} is mounted read-only: {reason}"));
            config.read_only = true;
        } else if !config.read_only && self.first.filesystem_is_read_only() {
            bail!("the kernel holds the filesystem of {at} read-only; first run: mount -o remount,rw {at}");
        }
        let is_confined = self.is_confined();
        for (is_given, is_so, option) in
            [(args.sandbox, is_confined, "--sandbox"), (args.no_sandbox, !is_confined, "--no-sandbox")]
        {
            if is_given && !is_so {
                bail!("{option} differs from the mount on {at}, whose server serves this mount too; omit it");
            }
        }
        if is_confined {
            options::distrust(&args.options, config, Trust::Nothing);
        }
        let mount = self.first.mount_beside(&found.path, found.st_ino, dir, config)?;
        let noted = call(Request::Join(join::Request::Joined { mount }));
        if noted.is_err() {
            let _ = ubtrfs_fuse::unmount(dir, true);
        }
        noted.map(|_| ()).with_context(|| format!("cannot mount on {}", dir.shown()))
    }
}

/// The error for a subvolume that cannot be mounted. The server knows no paths of the host.
fn not_mounted(text: &str, device: &str, at: &str) -> anyhow::Error {
    let place = if text.ends_with("ubtrfs subvolume list") { format!(" {at}") } else { String::new() };
    anyhow!("cannot mount {device}: {text}{place}")
}
