//! Tests of the control socket of an image that a process has open without a mount: who finds it, and what it obeys.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use crate::common::filesystem;
use rustix::io::Errno;
use ubtrfs_control::{
    Channel, ControlServer, ImageId, ImageWork, LocalProcesses, OpenImage, Request, Response, balance,
    filesystem as whole, unchecked_mount_file,
};
use ubtrfs_fs::Fs;

/// Serves a filesystem in memory as if it were in this file.
fn serve(fs: &Arc<Fs>, image: &Path) -> ControlServer {
    let id = ImageId::of(File::open(image).unwrap()).unwrap();
    let server = ControlServer::listen_for_image(id, ImageWork::Balance).unwrap();
    server.serve(Arc::new(OpenImage::new(id, fs)), Arc::new(LocalProcesses));
    server
}

#[test]
fn an_open_image_is_found_by_its_identity_and_obeys_descriptors_of_it_alone() {
    let fs = filesystem("");
    let (image, other) = (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
    let server = serve(&fs, image.path());
    assert!(Channel::open_image(other.path(), false).is_none());
    let link = other.path().with_extension("link");
    std::os::unix::fs::symlink(image.path(), &link).unwrap();
    let set_label = || Request::Filesystem(whole::Request::SetLabel { label: b"new".to_vec() });
    for path in [image.path(), &link] {
        let channel = Channel::open_image(path, true).unwrap();
        assert!(!channel.is_mount());
        let status = channel.call(Request::Balance(balance::Request::Status), &[]).unwrap();
        assert_eq!(status, Response::Balance(balance::Response::Status(None)));
        channel.call(set_label(), &[]).unwrap();
        // Paths of the host are never opened for an image.
        assert_eq!(channel.open(Path::new("/")).unwrap_err().errno(), Errno::BUSY);
        assert_eq!(channel.is_dir(Path::new("/")).unwrap_err().errno(), Errno::BUSY);
    }
    std::fs::remove_file(&link).unwrap();
    // A descriptor that is only readable changes nothing, and a descriptor of another file proves nothing.
    let reader = Channel::open_image(image.path(), false).unwrap();
    reader.call(Request::Balance(balance::Request::Status), &[]).unwrap();
    assert_eq!(reader.call(set_label(), &[]).unwrap_err().errno(), Errno::ROFS);
    let foreign = Channel::at(server.name(), unchecked_mount_file(File::open(other.path()).unwrap().into()));
    let failure = foreign.call(Request::Balance(balance::Request::Status), &[]).unwrap_err();
    assert_eq!(failure.errno(), Errno::BADF);
    server.stop();
    server.finish(None);
    assert!(Channel::open_image(image.path(), false).is_none());
    fs.close().unwrap();
}
