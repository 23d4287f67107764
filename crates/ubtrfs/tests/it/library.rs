//! Tests the library as a program uses it, judged by the checkers and by Linux: content written through paths,
//! files and subvolumes exists when the image is opened again, and errors name the operation, the path and the
//! reason.

use std::ffi::OsStr;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ubtrfs::{Caller, FileKind, FileTimes, Filesystem, Metadata, MountOptions, OpenOptions, SnapshotAccess};
use ubtrfs_testkit::{capability, judge, second_opinion};

const SIZE: u64 = 512 << 20;

fn new_image() -> (tempfile::TempDir, PathBuf, Filesystem) {
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("disk.img");
    let fs = Filesystem::make_image(&image, SIZE).unwrap();
    (scratch, image, fs)
}

/// Checks that both checkers find nothing, and that Linux mounts, reads and scrubs the image.
fn verdict(image: &Path) {
    second_opinion(image).unwrap();
    if capability::kernel_oracle() {
        judge(image, "", &[]).unwrap();
    }
}

#[test]
fn a_reflink_onto_its_source_changes_nothing() {
    let (_scratch, image, fs) = new_image();
    fs.write("/f", "precious").unwrap();
    fs.hard_link("/f", "/hard").unwrap();
    fs.symlink("f", "/soft").unwrap();
    for to in ["/f", "/hard", "/soft", "/./f"] {
        let error = fs.reflink("/f", to).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains("the source itself"), "{error}");
        assert_eq!(fs.read("/f").unwrap(), b"precious");
    }
    fs.write("/g", vec![1; 1 << 20]).unwrap();
    fs.reflink("/f", "/g").unwrap();
    assert_eq!(fs.read("/g").unwrap(), b"precious");
    fs.close().unwrap();
    verdict(&image);
}

#[test]
fn read_only_devices_open_a_read_only_filesystem() {
    let (_scratch, image, fs) = new_image();
    fs.close().unwrap();
    let device = std::sync::Arc::new(ubtrfs::FileDevice::open(&image, ubtrfs::Access::ReadOnly).unwrap());
    let fs = Filesystem::open_devices(vec![device], MountOptions::default()).unwrap();
    assert_eq!(fs.create_dir("/d").unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
}

#[test]
fn changes_are_present_when_the_image_is_opened_again() {
    let (_scratch, image, fs) = new_image();
    fs.create_dir_all("/a/b/c").unwrap();
    fs.create_dir_all("/a/b/c").unwrap();
    fs.write("/a/b/c/small", "hello").unwrap();
    fs.write("/a/large", vec![9; 3 << 20]).unwrap();
    fs.symlink("b/c/small", "/a/link").unwrap();
    fs.hard_link("/a/large", "/a/large-too").unwrap();
    fs.reflink("/a/large", "/a/copy").unwrap();
    fs.set_owner("/a/large", 1000, 100).unwrap();
    // Set permissions after the owner, because a change of owner clears set-user-id.
    fs.set_permissions("/a/large", 0o4750).unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::new(1_234_567_890, 5);
    let times = FileTimes::new().set_accessed(time).set_modified(time).set_created(time + Duration::from_secs(1));
    fs.set_times("/a/large", times).unwrap();
    fs.set_xattr("/a/large", "user.color", "blue").unwrap();
    fs.rename("/a/b/c", "/moved").unwrap();
    fs.close().unwrap();

    let fs = Filesystem::open_image_with(&image, MountOptions { read_only: true, ..Default::default() }).unwrap();
    assert_eq!(fs.read("/moved/small").unwrap(), b"hello");
    assert_eq!(fs.read("/a/copy").unwrap(), vec![9; 3 << 20]);
    assert_eq!(fs.read_link("/a/link").unwrap(), Path::new("b/c/small"));
    assert!(fs.symlink_metadata("/a/link").unwrap().is_symlink());
    let metadata = fs.metadata("/a/large-too").unwrap();
    assert_eq!((metadata.permissions(), metadata.uid(), metadata.gid(), metadata.nlink()), (0o4750, 1000, 100, 2));
    assert_eq!((metadata.accessed(), metadata.modified()), (Some(time), Some(time)));
    assert_eq!(metadata.created(), Some(time + Duration::from_secs(1)));
    assert_eq!(fs.xattr_names("/a/large").unwrap(), [b"user.color"]);
    let mut names: Vec<_> = fs.read_dir("/a").unwrap().map(|entry| entry.unwrap().file_name().to_owned()).collect();
    names.sort();
    assert_eq!(names, ["b", "copy", "large", "large-too", "link"].map(OsStr::new));
    let error = fs.write("/new", "").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
    fs.close().unwrap();
    verdict(&image);
}

#[test]
fn a_file_reads_writes_seeks_and_appends() {
    let (_scratch, image, fs) = new_image();
    let mut file = fs.open_with("/f", OpenOptions::new().read(true).write(true).create(true)).unwrap();
    file.write_all(b"0123456789").unwrap();
    file.seek(SeekFrom::End(-4)).unwrap();
    let mut end = String::new();
    file.read_to_string(&mut end).unwrap();
    assert_eq!(end, "6789");
    file.write_all_at(1 << 20, b"far").unwrap();
    assert_eq!(file.next_data(4096).unwrap(), Some((1 << 20, (1 << 20) + 3)));
    file.set_len(4).unwrap();
    file.sync_all().unwrap();
    let mut appender = fs.open_with("/f", OpenOptions::new().append(true)).unwrap();
    let mut other = fs.open_with("/f", OpenOptions::new().append(true)).unwrap();
    std::thread::scope(|scope| {
        for file in [&mut appender, &mut other] {
            scope.spawn(move || (0..1000).for_each(|_| file.write_all(b"12345").unwrap()));
        }
    });
    assert_eq!(fs.metadata("/f").unwrap().len(), 4 + 2 * 5 * 1000, "appends were lost");
    assert_eq!(appender.read(&mut [0]).unwrap_err().to_string(), "cannot read '/f': Bad file descriptor (os error 9)");
    drop((file, appender, other));
    fs.close().unwrap();
    verdict(&image);
}

#[test]
fn not_everybody_can_write_into_new_files_and_directories() {
    let (_scratch, _image, fs) = new_image();
    let permissions = |path: &str| fs.metadata(path).unwrap().permissions();
    fs.create_dir("/d").unwrap();
    fs.create_dir_all("/a/b").unwrap();
    fs.write("/f", "").unwrap();
    fs.create_subvolume("/s").unwrap();
    assert_eq!(["/d", "/a", "/a/b", "/s", "/f"].map(permissions), [0o755, 0o755, 0o755, 0o755, 0o644]);
    for (umask, dir, file) in [(0o077, 0o700, 0o600), (0o002, 0o775, 0o664)] {
        let other = fs.with_caller(Caller { uid: 1000, gid: 1000, umask });
        let at = |name: &str| format!("/{name}-{umask}");
        other.create_dir(at("d")).unwrap();
        other.create_subvolume(at("s")).unwrap();
        other.write(at("f"), "").unwrap();
        assert_eq!(["d", "s", "f"].map(|name| permissions(&at(name))), [dir, dir, file]);
    }
}

#[test]
fn errors_of_reading_and_writing_whole_files_name_what_failed() {
    let (_scratch, _image, fs) = new_image();
    fs.create_dir("/dir").unwrap();
    let read = fs.read("/no").unwrap_err();
    assert_eq!((read.operation(), &*read.to_string()), ("read", "cannot read '/no': no such file or directory"));
    for (path, reason) in [("/dir", "is a directory"), ("/no/f", "no such file or directory")] {
        let written = fs.write(path, "text").unwrap_err();
        assert_eq!(written.to_string(), format!("cannot write '{path}': {reason}"));
    }
}

#[test]
fn an_image_that_is_open_in_this_process_is_called_so() {
    let (_scratch, image, fs) = new_image();
    let error = Filesystem::open_image(&image).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::ResourceBusy);
    assert!(text.contains("this program has it open already") && !text.contains("pid"), "{text}");
    fs.close().unwrap();
    // The last handle of the filesystem is gone, so the image can be opened again.
    Filesystem::open_image(&image).unwrap().close().unwrap();
}

#[test]
fn a_removed_file_stays_while_it_is_open() {
    let (_scratch, image, fs) = new_image();
    fs.write("/f", "still here").unwrap();
    let file = fs.open("/f").unwrap();
    fs.remove_file("/f").unwrap();
    assert!(!fs.exists("/f"));
    assert_eq!(file.read_all().unwrap(), b"still here");
    drop(file);
    fs.close().unwrap();
    verdict(&image);
}

#[test]
fn snapshots_keep_the_earlier_content_and_can_be_deleted() {
    let (_scratch, image, fs) = new_image();
    fs.create_subvolume("/data").unwrap();
    fs.write("/data/f", "before").unwrap();
    fs.snapshot("/data", "/snap", SnapshotAccess::ReadOnly).unwrap();
    fs.snapshot("/data", "/data/inside", SnapshotAccess::ReadWrite).unwrap();
    fs.write("/data/f", "after").unwrap();
    assert_eq!(fs.read("/snap/f").unwrap(), b"before");
    assert_eq!(fs.write("/snap/f", "x").unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
    let (data, snap) = (fs.subvolume("/data").unwrap(), fs.subvolume("/snap").unwrap());
    assert_eq!(snap.parent_uuid(), Some(data.uuid()));
    assert!(snap.is_read_only() && !data.is_read_only());
    assert_eq!(fs.delete_subvolume("/data").unwrap_err().kind(), ErrorKind::DirectoryNotEmpty);
    fs.delete_subvolume("/snap").unwrap();
    assert_eq!(fs.subvolumes().unwrap().len(), 3);
    fs.close().unwrap();
    verdict(&image);
}

#[test]
fn a_tree_is_removed_with_all_that_is_in_it() {
    let (_scratch, image, fs) = new_image();
    for dir in 0..20 {
        fs.create_dir_all(format!("/t/{dir}/deep/er")).unwrap();
        for file in 0..50 {
            fs.write(format!("/t/{dir}/deep/{file}"), "x").unwrap();
        }
    }
    fs.symlink("/keep", "/t/3/link").unwrap();
    fs.create_dir("/keep").unwrap();
    fs.write("/keep/me", "kept").unwrap();
    fs.remove_dir_all("/t").unwrap();
    assert!(!fs.exists("/t"));
    assert_eq!(fs.read("/keep/me").unwrap(), b"kept");
    assert_eq!(fs.remove_dir_all("/keep/me").unwrap_err().kind(), ErrorKind::NotADirectory);
    fs.close().unwrap();
    verdict(&image);
}

#[test]
fn new_files_belong_to_the_caller() {
    let (_scratch, _image, fs) = new_image();
    let alice = fs.with_caller(Caller { uid: 1000, gid: 1000, umask: 0o027 });
    alice.create_dir("/home").unwrap();
    alice.write("/home/f", "").unwrap();
    let (dir, file) = (fs.metadata("/home").unwrap(), fs.metadata("/home/f").unwrap());
    assert_eq!((dir.uid(), dir.permissions()), (1000, 0o750));
    assert_eq!((file.uid(), file.gid(), file.permissions()), (1000, 1000, 0o640));
}

#[test]
fn errors_say_operation_path_and_reason() {
    let (_scratch, image, fs) = new_image();
    fs.create_dir("/dir").unwrap();
    fs.write("/file", "").unwrap();
    let cases: [(ubtrfs::Result<()>, &str, ErrorKind); 7] = [
        (fs.read("/no").map(drop), "cannot read '/no': no such file or directory", ErrorKind::NotFound),
        (fs.read("/dir").map(drop), "cannot read '/dir': is a directory", ErrorKind::IsADirectory),
        (fs.create_dir("/dir"), "cannot make directory '/dir': file exists", ErrorKind::AlreadyExists),
        (fs.create_dir("/file/x"), "cannot make directory '/file/x': not a directory", ErrorKind::NotADirectory),
        (
            fs.remove_file("/.."),
            "cannot remove '/..': invalid argument: the path does not end in a name",
            ErrorKind::InvalidInput,
        ),
        (
            fs.delete_subvolume("/dir"),
            "cannot delete subvolume '/dir': invalid argument: not a subvolume",
            ErrorKind::InvalidInput,
        ),
        (
            fs.open_with("/file", &OpenOptions::new()).map(drop),
            "cannot open '/file': invalid argument: the options allow neither reading nor writing",
            ErrorKind::InvalidInput,
        ),
    ];
    for (result, text, kind) in cases {
        let error = result.unwrap_err();
        assert_eq!((error.to_string().as_str(), error.kind()), (text, kind));
    }
    let busy = Filesystem::open_image(&image).unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::ResourceBusy, "{busy}");
    assert_eq!(Filesystem::make_image(&image, SIZE).unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(Filesystem::open_image("/nowhere/x.img").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn an_image_that_cannot_be_made_leaves_no_file() {
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("tiny.img");
    assert!(Filesystem::make_image(&image, 1 << 20).is_err());
    assert!(!image.exists());
}

#[test]
fn a_large_directory_is_listed_once_and_while_it_grows() {
    let (_scratch, _image, fs) = new_image();
    fs.create_dir("/d").unwrap();
    for number in 0..1000 {
        fs.write(format!("/d/{number}"), "").unwrap();
    }
    let mut seen = std::collections::BTreeSet::new();
    for (count, entry) in fs.read_dir("/d").unwrap().enumerate() {
        let entry = entry.unwrap();
        assert_eq!(entry.kind(), Some(FileKind::File));
        assert!(seen.insert(entry.file_name().as_bytes().to_vec()), "listed twice");
        fs.write(format!("/d/new-{count}"), "").unwrap();
        assert!(count < 3000, "a directory that grows has no end");
    }
    assert!((0..1000).all(|number| seen.contains(number.to_string().as_bytes())));
}

/// Returns the mode, owner, group, and times of access, modification and creation.
fn attributes(metadata: &Metadata) -> (u32, u32, u32, [Option<SystemTime>; 3]) {
    let times = [metadata.accessed(), metadata.modified(), metadata.created()];
    (metadata.mode(), metadata.uid(), metadata.gid(), times)
}

#[test]
fn setters_change_only_the_attributes_they_name() {
    let (_scratch, image, fs) = new_image();
    fs.write("/target", "content").unwrap();
    fs.symlink("target", "/link").unwrap();
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let all = FileTimes::new().set_accessed(at(1)).set_modified(at(2)).set_created(at(3));
    fs.set_times("/link", all).unwrap();
    fs.set_owner("/link", 1000, 100).unwrap();
    fs.set_owner("/link", None, 101).unwrap();
    fs.set_permissions("/link", 0o600).unwrap();
    let link = attributes(&fs.symlink_metadata("/link").unwrap());
    assert_eq!((link.0, link.1, link.2), (0o120_777, 0, 0), "the setters followed the link");
    let expected = (0o100_600, 1000, 101, [at(1), at(2), at(3)].map(Some));
    assert_eq!(attributes(&fs.metadata("/target").unwrap()), expected);

    fs.set_owner_nofollow("/link", 7, None).unwrap();
    fs.set_times_nofollow("/link", FileTimes::new().set_modified(at(4))).unwrap();
    let changed = attributes(&fs.symlink_metadata("/link").unwrap());
    assert_eq!(changed, (0o120_777, 7, 0, [link.3[0], Some(at(4)), link.3[2]]));
    assert_eq!(attributes(&fs.metadata("/target").unwrap()), expected);

    // The open file needs no name.
    let file = fs.open_with("/private", OpenOptions::new().write(true).create_new(true).mode(0o640)).unwrap();
    assert_eq!(file.metadata().unwrap().permissions(), 0o640);
    fs.remove_file("/private").unwrap();
    file.set_owner(5, 6).unwrap();
    file.set_permissions(0o4711).unwrap();
    file.set_times(all).unwrap();
    assert_eq!(attributes(&file.metadata().unwrap()), (0o104_711, 5, 6, [at(1), at(2), at(3)].map(Some)));
    drop(file);

    fs.close().unwrap();
    let fs = Filesystem::open_image(&image).unwrap();
    assert_eq!(attributes(&fs.metadata("/target").unwrap()), expected);
    fs.close().unwrap();
    verdict(&image);
}

/// A backup of a device lies beside the image, and the device itself is missing.
#[test]
fn a_found_device_that_missed_changes_is_not_overwritten() {
    if !capability::program("mkfs.btrfs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [a, b, backup] = ["a.img", "b.img", "backup"].map(|name| dir.path().join(name));
    for image in [&a, &b] {
        std::fs::File::create(image).unwrap().set_len(256 << 20).unwrap();
    }
    let args = ["-q", "-d", "raid1", "-m", "raid1", a.to_str().unwrap(), b.to_str().unwrap()];
    ubtrfs_testkit::run("mkfs.btrfs", args).unwrap();
    std::fs::copy(&b, &backup).unwrap();
    for name in ["/one", "/two", "/three"] {
        let options = MountOptions::parse(&format!("device={}", b.display())).unwrap();
        let fs = Filesystem::open_image_with(&a, options).unwrap();
        fs.write(name, "text").unwrap();
        fs.close().unwrap();
    }
    std::fs::remove_file(&b).unwrap();
    let before = std::fs::read(&backup).unwrap();
    let fs = Filesystem::open_image(&a).unwrap();
    assert!(fs.read_only_reason().unwrap().contains("missing: device 2"));
    drop(fs);
    let fs = Filesystem::open_image_with(&a, MountOptions::parse("degraded").unwrap()).unwrap();
    fs.write("/four", "text").unwrap();
    fs.close().unwrap();
    assert!(std::fs::read(&backup).unwrap() == before);
    if capability::kernel_oracle() {
        ubtrfs_testkit::btrfs_check_array(&[&a]).unwrap();
    }
}
