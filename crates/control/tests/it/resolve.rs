//! Tests which paths an address leads to, and whether an answer says that there may be more.

use ubtrfs_control::{CommandCaller, CommandContext, Request, Response, execute, resolve};
use ubtrfs_fs::{Fs, NewInode};
use ubtrfs_transaction::Job;

use crate::common::{ROOT, TestHost, filesystem};

/// The paths of the files that use the data at an address, and whether there may be more.
fn paths_of(fs: &Fs, bytenr: u64, max: u32) -> (Vec<String>, bool) {
    let (host, job) = (TestHost::of(0), Job::new());
    let caller = CommandCaller::of_image(0, 0);
    let context = CommandContext { fs, host: &host, caller: &caller, files: &[], stream: None, job: &job };
    let request = resolve::Request::Logical { bytenr, whole_extent: false, max: Some(max) };
    let Ok(Response::Resolve(resolve::Response::Paths { paths, is_cut, .. })) =
        execute(&context, Request::Resolve(request))
    else {
        panic!("no paths")
    };
    let mut paths: Vec<_> = paths.into_iter().map(|path| String::from_utf8(path.0).unwrap()).collect();
    paths.sort();
    (paths, is_cut)
}

#[test]
fn an_answer_with_fewer_uses_than_an_extent_has_says_so() {
    const LEN: u64 = 16 << 10;
    let fs = filesystem("");
    let create = |name: &[u8]| fs.create(fs.root(), name, NewInode::file(0o644), &ROOT).unwrap().id;
    let (file, clone) = (create(b"file"), create(b"clone"));
    fs.write(file, 0, &[1; LEN as usize]).unwrap();
    fs.flush_data().unwrap();
    fs.clone_range(file, 0, file, LEN, LEN).unwrap();
    fs.clone_range(file, 0, file, 2 * LEN, LEN).unwrap();
    fs.clone_range(file, 0, clone, 0, LEN).unwrap();
    fs.sync().unwrap();
    let bytenr = fs.extents(file).unwrap()[0].disk_bytenr.0;
    // The extent has four uses in two files.
    assert_eq!(paths_of(&fs, bytenr, 4), (vec!["clone".to_owned(), "file".to_owned()], false));
    for max in 1..4 {
        assert!(paths_of(&fs, bytenr, max).1, "at most {max}");
    }
}
