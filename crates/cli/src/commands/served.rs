//! Long work on an image that is not mounted, such as a balance: other processes can ask about it and cancel it through
//! a control socket. Work on an export of an NBD server has none, and is ended by a signal.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use ubtrfs_control::{
    Channel, ControlServer, ImageId, ImageWork, LocalProcesses, OpenImage, await_unmount, open_image,
};
use ubtrfs_device::is_url;
use ubtrfs_fs::Fs;

use super::offline::{ImageOptions, ImageUse, with_shared_image};
use super::place::{CommandTarget, with_channel};
use crate::common::{Shown, calling_user};

/// Works like [`with_channel`], and serves commands of other processes on an image meanwhile.
pub(crate) fn with_served<T>(
    target: &CommandTarget,
    options: &ImageOptions,
    kind: ImageWork,
    work: impl FnOnce(&Channel<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let CommandTarget::Image(at) = target else { return with_channel(target, options, ImageUse::Write, work) };
    let (mut server, mut worked) = (None, false);
    let done = with_shared_image(&at.image, options, ImageUse::Write, |fs| {
        // An export has no descriptor by which a client proves that it may use the image.
        if !is_url(&at.image) {
            server = Some(serve(&at.image, kind, fs)?);
        }
        let (uid, gid) = calling_user();
        let done = work(&Channel::image(fs, uid, gid));
        worked = done.is_ok();
        server.iter().for_each(ControlServer::stop);
        done
    });
    // If the work succeeded, the error is that of closing the image.
    let lost = done.as_ref().err().filter(|_| worked).map(ToString::to_string);
    if let Some(server) = server {
        server.finish(lost.as_deref());
    }
    done
}

fn serve(image: &Path, kind: ImageWork, fs: &Arc<Fs>) -> anyhow::Result<ControlServer> {
    let made = open_image(image, false).and_then(ImageId::of).and_then(|id| {
        let server = ControlServer::listen_for_image(id, kind)?;
        server.serve(Arc::new(OpenImage::new(id, fs)), Arc::new(LocalProcesses));
        Ok(server)
    });
    made.with_context(|| format!("cannot make the control socket of {}", image.shown()))
}

/// Works like [`with_channel`], but if a process serves commands on the image, uses that process.
pub(crate) fn with_running<T>(
    target: &CommandTarget,
    options: &ImageOptions,
    usage: ImageUse,
    work: impl FnOnce(&Channel<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    if let CommandTarget::Image(at) = target
        && let Some(channel) = Channel::open_image(&at.image, usage == ImageUse::Write)
    {
        return work(&channel);
    }
    with_channel(target, options, usage, work)
}

/// Runs a command that ends the work of the process at the other end. If that process has an image open, waits until it
/// has closed the image.
pub(crate) fn until_closed<T>(
    channel: &Channel<'_>,
    target: &CommandTarget,
    command: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<()> {
    let end = if channel.is_mount() { None } else { channel.connect_to_end() };
    command()?;
    match end.map(|stream| stream.and_then(|stream| await_unmount(stream, Some(CLOSE_PATIENCE)))) {
        // Without a connection, the process had ended already.
        None | Some(Ok(None) | Err(_)) => Ok(()),
        Some(Ok(Some(lost))) => {
            bail!("{} was closed, but its last changes may be lost: {lost}", target.filesystem())
        }
    }
}

/// How long a command waits until the process that worked on an image has closed it.
const CLOSE_PATIENCE: Duration = Duration::from_secs(60);
