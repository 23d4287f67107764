//! Tests of calls that must fail before they change anything, and of what their errors say.

use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use ubtrfs::{Device, Filesystem, Job, MemoryDevice, MkfsOptions, MountOptions, OpenOptions, ReceiveOptions};

const SIZE: u64 = 256 << 20;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const EXDEV: i32 = 18;

fn device() -> Arc<dyn Device> {
    Arc::new(MemoryDevice::new(SIZE))
}

fn made() -> Arc<dyn Device> {
    let device = device();
    Filesystem::make_on(device.as_ref(), &MkfsOptions::default()).unwrap();
    device
}

fn open(devices: &[&Arc<dyn Device>], options: &str) -> ubtrfs::Result<Filesystem> {
    Filesystem::open_devices(devices.iter().copied().cloned().collect(), MountOptions::parse(options).unwrap())
}

fn errno<T>(done: ubtrfs::Result<T>) -> i32 {
    done.err().unwrap().errno()
}

#[test]
fn u1_a_device_belongs_to_one_filesystem() {
    let (device, other) = (made(), made());
    let fs = open(&[&device], "").unwrap();
    fs.write("/f", vec![1; 1 << 20]).unwrap();
    fs.sync().unwrap();
    let second = open(&[&other], "").unwrap();
    let forced = MkfsOptions { force: true, ..MkfsOptions::default() };
    assert_eq!(errno(open(&[&device], "")), EBUSY);
    assert_eq!(errno(open(&[&device], "ro")), EBUSY);
    assert_eq!(errno(Filesystem::make_on(device.as_ref(), &forced)), EBUSY);
    assert_eq!(errno(second.add_device(Arc::clone(&device), &Job::new())), EBUSY);
    assert_eq!(errno(fs.add_device(Arc::clone(&device), &Job::new())), EBUSY);
    assert_eq!(errno(fs.replace_device(1, Arc::clone(&device), &Job::new())), EBUSY);
    assert_eq!(errno(fs.replace_device(1, Arc::clone(&other), &Job::new())), EBUSY);
    // The engine refuses its own devices as well.
    assert_eq!(fs.engine().add_device(Arc::clone(&device), &Job::new()).map_err(|error| error.errno()), Err(EINVAL));
    assert_eq!(fs.read("/f").unwrap(), vec![1; 1 << 20]);
    fs.close().unwrap();
    second.close().unwrap();
    // Readers may share a device, and a closed filesystem has none, although a handle is left.
    let reader = open(&[&device], "ro").unwrap();
    let again = open(&[&device], "ro").unwrap();
    assert_eq!(errno(open(&[&device], "")), EBUSY);
    let left = again.clone();
    drop(reader);
    again.close().unwrap();
    open(&[&device], "").unwrap().close().unwrap();
    drop(left);
    for device in [device, other] {
        assert!(ubtrfs::check(vec![device], ubtrfs::CheckOptions::default(), &mut |_| {}).unwrap().is_clean());
    }
}

#[test]
fn u1_devices_that_join_and_leave_are_known() {
    let (one, two, three) = (made(), device(), device());
    let fs = open(&[&one], "").unwrap();
    fs.add_device(Arc::clone(&two), &Job::new()).unwrap();
    let forced = MkfsOptions { force: true, ..MkfsOptions::default() };
    assert_eq!(errno(Filesystem::make_on(two.as_ref(), &forced)), EBUSY);
    fs.replace_device(2, Arc::clone(&three), &Job::new()).unwrap();
    assert_eq!(errno(Filesystem::make_on(three.as_ref(), &forced)), EBUSY);
    // The replaced one is free again.
    Filesystem::make_on(two.as_ref(), &forced).unwrap();
    fs.remove_devices(&[2], &Job::new()).unwrap();
    Filesystem::make_on(three.as_ref(), &forced).unwrap();
    fs.close().unwrap();
    assert!(ubtrfs::check(vec![one], ubtrfs::CheckOptions::default(), &mut |_| {}).unwrap().is_clean());
}

#[test]
fn a_device_is_given_once() {
    let device = made();
    let options = MkfsOptions::default().with_array_profiles();
    assert_eq!(errno(Filesystem::make_on_devices(&[device.as_ref(), device.as_ref()], &options)), EINVAL);
    assert_eq!(errno(open(&[&device, &device], "")), EINVAL);
    open(&[&device], "").unwrap().close().unwrap();
}

#[test]
fn what_has_no_name_is_not_emptied() {
    let fs = Filesystem::make_in_memory(SIZE).unwrap();
    fs.create_dir_all("/d/e").unwrap();
    fs.write("/f", "").unwrap();
    for path in ["", "/", "//", ".", "..", "/.", "/d/..", "/d/.", "d/e/../.."] {
        assert_eq!(errno(fs.remove_dir_all(path)), EINVAL, "{path:?}");
    }
    assert!(fs.exists("/d/e") && fs.exists("/f"));
}

#[test]
fn errors_of_the_input_of_a_receive_keep_their_number() {
    struct Fails(i32);
    impl Read for Fails {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::from_raw_os_error(self.0))
        }
    }
    let fs = Filesystem::make_in_memory(SIZE).unwrap();
    let receive =
        |input: &mut (dyn Read + Send)| errno(fs.receive("/", input, &ReceiveOptions::default(), &Job::new()));
    for number in [5, 110] {
        assert_eq!(receive(&mut Fails(number)), number);
    }
    assert_eq!(receive(&mut &b"btrfs-stream\0\x01\0\0\0garbage that is no command"[..]), EINVAL);
}

#[test]
fn data_is_shared_inside_of_a_filesystem() {
    let (one, other) = (Filesystem::make_in_memory(SIZE).unwrap(), Filesystem::make_in_memory(SIZE).unwrap());
    for fs in [&one, &other] {
        fs.write("/f", vec![1; 8192]).unwrap();
    }
    let (to, from) = (one.open_with("/f", OpenOptions::new().write(true)).unwrap(), other.open("/f").unwrap());
    assert_eq!(errno(to.clone_range(0, &from, 0, 4096)), EXDEV);
    assert_eq!(errno(to.dedupe_range(0, &from, 0, 4096, &Job::new())), EXDEV);
}

#[test]
fn all_devices_together_have_at_most_8_eib() {
    let fs = Filesystem::make_in_memory(SIZE).unwrap();
    for len_bytes in [1 << 63, u64::MAX] {
        assert_eq!(errno(fs.add_device(Arc::new(MemoryDevice::new(len_bytes)), &Job::new())), EINVAL);
    }
    fs.close().unwrap();
}

#[test]
fn messages_are_one_line() {
    let fs = Filesystem::make_in_memory(SIZE).unwrap();
    let path = std::ffi::OsStr::from_bytes(b"/a\nb\x1b[31m\xff\xc3\xa9");
    let message = fs.read(path).unwrap_err().to_string();
    assert_eq!(message, "cannot read '/a\\nb\\u{1b}[31m\\xff\u{e9}': no such file or directory");
}

#[test]
fn only_what_can_be_looked_up_exists() {
    let fs = Filesystem::make_in_memory(SIZE).unwrap();
    fs.symlink("self", "/self").unwrap();
    fs.write("/f", "").unwrap();
    let long = "x".repeat(300);
    assert!(!fs.exists("/self") && !fs.exists(&long));
    assert!(fs.try_exists("/self").is_err() && fs.try_exists(&long).is_err());
    assert!(!fs.try_exists("/f/g").unwrap() && fs.try_exists("/f").unwrap());
}
