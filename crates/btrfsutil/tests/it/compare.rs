//! The original library and ours give equal results.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use ubtrfs::fuse::{Mount, MountConfig, unmount};
use ubtrfs::{Filesystem, MountOptions};
use ubtrfs_testkit::{Image, LoopMount, btrfs_check, capability, exported_functions, run};

use crate::library::{Library, compile, original, output_of, program};

fn ready() -> bool {
    capability::fuse() && capability::kernel_oracle() && capability::c_header("btrfsutil.h")
}

/// Makes an image with subvolumes, some of them nested or hidden from users, and with quotas.
fn image() -> Image {
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let at = |path: &str| linux.path().join(path);
    let mode = |path: &str, mode| fs::set_permissions(at(path), fs::Permissions::from_mode(mode)).unwrap();
    let btrfs = |words: &[&str], paths: &[&str]| {
        let words = words.iter().map(|word| OsStr::new(word).to_owned());
        run("btrfs", words.chain(paths.iter().map(|path| at(path).into_os_string()))).unwrap();
    };
    for dir in ["dir/in/deep", "hidden", "locked", "sticky", "open"] {
        fs::create_dir_all(at(dir)).unwrap();
    }
    fs::write(at("dir/file"), "content").unwrap();
    for path in ["a", "dir/in/b", "dir/in/deep/c", "a/d"] {
        btrfs(&["subvolume", "create"], &[path]);
    }
    fs::write(at("a/x"), "data").unwrap();
    fs::create_dir(at("a/y")).unwrap();
    btrfs(&["subvolume", "snapshot"], &["a", "snap"]);
    btrfs(&["subvolume", "snapshot", "-r"], &["a", "snap-ro"]);
    btrfs(&["subvolume", "create"], &["hidden/sub"]);
    btrfs(&["subvolume", "create"], &["locked/inner"]);
    symlink("a", at("link")).unwrap();
    symlink("nowhere", at("broken")).unwrap();
    for (path, bits) in [(".", 0o755), ("locked", 0o700), ("sticky", 0o1777), ("open", 0o777)] {
        mode(path, bits);
    }
    btrfs(&["quota", "enable"], &["."]);
    btrfs(&["qgroup", "create", "1/0"], &["."]);
    btrfs(&["qgroup", "create", "1/1"], &["."]);
    linux.close().unwrap();
    image
}

/// Runs work in Linux's mount of a copy of an image, with mount options.
fn on_linux(image: &Image, options: &str, work: impl FnOnce(&Path) -> String) -> String {
    let copy = Image::copy_of(image.path()).unwrap();
    let linux = LoopMount::new(copy.path(), options).unwrap();
    let output = work(linux.path());
    linux.close().unwrap();
    output
}

/// Runs work in our mount of a copy of an image, and checks the image after it. The work gets the paths of the mount and of
/// the copy.
fn on_ubtrfs(image: &Image, options: &str, work: impl FnOnce(&Path, &Path) -> String) -> String {
    let copy = Image::copy_of(image.path()).unwrap();
    let dir = TempDir::with_prefix("ubtrfs-btrfsutil-").unwrap();
    let server = mounted(copy.path(), options, dir.path());
    let server = thread::spawn(move || server.run());
    await_mount(dir.path());
    let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(dir.path(), copy.path())));
    unmount(dir.path(), worked.is_err()).unwrap();
    server.join().unwrap().unwrap();
    let output = worked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    btrfs_check(copy.path()).unwrap();
    output
}

/// Waits until something is mounted on the directory. The server itself mounts a subvolume.
fn await_mount(dir: &Path) {
    for _ in 0..400 {
        if fs::read_to_string("/proc/mounts").unwrap().contains(dir.to_str().unwrap()) {
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
    panic!("nothing was mounted on {}", dir.display());
}

/// Prepares the mount of an image.
fn mounted(image: &Path, options: &str, dir: &Path) -> Mount {
    let options = MountOptions { track_lookups: true, ..MountOptions::parse(options).unwrap() };
    let fs = Filesystem::open_image_with(image, options).unwrap();
    let config = MountConfig { fsname: "test".to_owned(), allow_other: true, ..MountConfig::default() };
    fs.mount(dir, &config).unwrap()
}

/// Compares the output of a program with the original library on Linux, with ours on Linux, and with ours on our mount.
fn compare(program: &[&OsStr], min_lines: usize, options: &str) {
    let (image, library) = (image(), Library::link());
    let call = |dir: &Path, library| {
        let words: Vec<&OsStr> = program.iter().copied().chain([dir.as_os_str()]).collect();
        output_of(&words, library)
    };
    let theirs = on_linux(&image, options, |dir| call(dir, None));
    assert!(theirs.lines().count() >= min_lines, "{theirs}");
    let ours = on_linux(&image, options, |dir| call(dir, Some(library.dir())));
    assert_equal(&ours, &theirs, "on the btrfs of Linux");
    let ours = on_ubtrfs(&image, options, |dir, _| call(dir, Some(library.dir())));
    assert_equal(&ours, &theirs, "on our mount");
}

#[track_caller]
fn assert_equal(ours: &str, theirs: &str, place: &str) {
    let differ: Vec<String> = ours
        .lines()
        .zip(theirs.lines())
        .filter(|(ours, theirs)| ours != theirs)
        .map(|(ours, theirs)| format!("{ours}\n  original: {theirs}"))
        .take(50)
        .collect();
    assert!(differ.is_empty(), "{place}:\n{}", differ.join("\n"));
    assert_eq!(ours.lines().count(), theirs.lines().count(), "{place}");
}

#[test]
fn a_program_of_the_original_header_gets_equal_results() {
    if !ready() {
        return;
    }
    let dir = TempDir::with_prefix("ubtrfs-btrfsutil-").unwrap();
    let calls = compile("calls", dir.path());
    compare(&[calls.as_os_str()], 5000, "");
    compare(&[calls.as_os_str()], 3000, "subvol=a");
}

#[test]
fn the_original_python_module_gets_equal_results() {
    if !ready() {
        return;
    }
    let Some(python) = capability::python_with("btrfsutil") else { return };
    compare(&[OsStr::new(&python), program("bindings.py").as_os_str()], 150, "");
}

#[test]
fn many_and_deep_subvolumes_are_found_and_deleted() {
    if !ready() {
        return;
    }
    let Some(python) = capability::python_with("btrfsutil") else { return };
    compare(&[OsStr::new(&python), program("many.py").as_os_str()], 12, "");
}

#[test]
fn the_functions_are_those_of_the_original() {
    if !capability::c_header("btrfsutil.h") {
        return;
    }
    let ours = exported_functions(&Library::link().dir().join("libbtrfsutil.so.1")).unwrap();
    assert_eq!(ours.len(), 83, "{ours:?}");
    let missing: Vec<String> =
        exported_functions(&original()).unwrap().into_iter().filter(|name| !ours.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let of_cargo = exported_functions(&Library::of_cargo().dir().join("libbtrfsutil.so.1")).unwrap();
    let mut bare: Vec<&str> = ours.iter().filter_map(|name| name.split('@').next()).collect();
    bare.sort_unstable();
    assert_eq!(of_cargo, bare);
}

#[test]
fn paths_in_an_image_get_the_results_of_paths_in_a_mount() {
    if !ready() {
        return;
    }
    let dir = TempDir::with_prefix("ubtrfs-btrfsutil-").unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (paths, library, image) = (compile("paths", dir.path()), Library::link(), image());
    fs::set_permissions(library.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    let theirs = on_linux(&image, "", |mount| output_of(&[paths.as_os_str(), mount.as_os_str()], None));
    assert!(theirs.lines().count() > 300, "{theirs}");
    // Another user than root, who may write to the image.
    let setpriv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"].map(OsStr::new);
    for user in [&[][..], &setpriv] {
        let copy = dir.path().join("disk.img");
        fs::copy(image.path(), &copy).unwrap();
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o666)).unwrap();
        let prefix = format!("{}:", copy.display());
        let words: Vec<&OsStr> = user.iter().copied().chain([paths.as_os_str(), OsStr::new(&prefix)]).collect();
        assert_equal(&output_of(&words, Some(library.dir())), &theirs, &format!("{user:?}"));
        btrfs_check(&copy).unwrap();
    }
}

#[test]
fn null_pointers_and_images_in_use_are_refused_and_newer_names_work() {
    if !ready() {
        return;
    }
    let library = Library::link();
    let path = library.dir().join("libbtrfsutil.so.1");
    let output = on_ubtrfs(&Image::kernel_made(256 << 20, &[]).unwrap(), "", |dir, image| {
        let program = program("interface.py");
        let words = [program.as_path(), &path, dir, image].map(Path::as_os_str);
        output_of(&[&[OsStr::new("python3")], &words[..]].concat(), None)
    });
    assert_eq!(output, "['snapshot']\ndone\n");
}

/// The variables that make the next test the server of a mount: the image, and the directory.
const SERVER: [&str; 2] = ["UBTRFS_BTRFSUTIL_IMAGE", "UBTRFS_BTRFSUTIL_DIR"];

#[test]
fn a_server_that_does_not_see_the_process_makes_snapshots_through_its_socket() {
    if let [Some(image), Some(dir)] = SERVER.map(std::env::var_os) {
        mounted(Path::new(&image), "", Path::new(&dir)).run().unwrap();
        return;
    }
    if !ready() || !capability::program("unshare") {
        return;
    }
    let Some(python) = capability::python_with("btrfsutil") else { return };
    let (library, image) = (Library::link(), Image::kernel_made(256 << 20, &[]).unwrap());
    let dir = TempDir::with_prefix("ubtrfs-btrfsutil-").unwrap();
    let name = "compare::a_server_that_does_not_see_the_process_makes_snapshots_through_its_socket";
    let mut server = Command::new("unshare")
        .args(["--pid", "--fork", "--kill-child"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .envs([(SERVER[0], image.path()), (SERVER[1], dir.path())])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    await_mount(dir.path());
    let code = "import btrfsutil, os, sys; os.chdir(sys.argv[1]); btrfsutil.create_subvolume('a'); \
                open('a/f', 'w').write('text'); btrfsutil.create_snapshot('a', 'b', read_only=True); \
                btrfsutil.create_subvolume('c', qgroup_inherit=btrfsutil.QgroupInherit()); \
                print(open('b/f').read(), btrfsutil.get_subvolume_read_only('b'), sorted(os.listdir('.')))";
    let words = [OsStr::new(&python), OsStr::new("-c"), OsStr::new(code), dir.path().as_os_str()];
    let called = std::panic::catch_unwind(|| output_of(&words, Some(library.dir())));
    unmount(dir.path(), called.is_err()).unwrap();
    assert!(server.wait().unwrap().success());
    let output = called.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    assert_eq!(output, "text True ['a', 'b', 'c']\n");
    btrfs_check(image.path()).unwrap();
}
