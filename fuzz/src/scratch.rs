//! A scratch directory of the host. In the scratch directory, files outside of the target must not change (I1 of the
//! crate).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// A scratch directory: an image, an archive, and the target of a command, with files around it that must not change.
pub(crate) struct Scratch {
    top: PathBuf,
    around: BTreeMap<PathBuf, Vec<u8>>,
}

impl Scratch {
    /// Makes a scratch directory in `UBTRFS_FUZZ_DIR` or in /dev/shm. All inputs of a fuzz target use one directory.
    pub(crate) fn new(title: &str) -> Self {
        let parent = std::env::var_os("UBTRFS_FUZZ_DIR").unwrap_or_else(|| "/dev/shm".into());
        let top = PathBuf::from(parent).join(format!("ubtrfs-fuzz-{title}-{}", std::process::id()));
        let mut this = Self { top, around: BTreeMap::new() };
        let work = this.work();
        fs::create_dir_all(&work).expect("a scratch directory");
        for name in ["x", "a", "file"] {
            fs::write(work.join(name), "sentinel").expect("a sentinel");
            fs::write(this.top.join(name), "sentinel").expect("a sentinel");
        }
        fs::create_dir_all(this.target()).expect("a target");
        this.around = this.all_around();
        this
    }

    /// The working directory of commands. It lies six levels below the scratch directory, so names with a few `..` stay
    /// inside.
    fn work(&self) -> PathBuf {
        self.top.join("1/2/3/4/5/work")
    }

    /// The directory that a command may fill.
    pub(crate) fn target(&self) -> PathBuf {
        self.work().join("target/deeper")
    }

    /// Path of the image.
    pub(crate) fn image(&self) -> PathBuf {
        self.top.join("image")
    }

    /// Path of the archive that a command writes or reads.
    pub(crate) fn archive(&self) -> PathBuf {
        self.top.join("archive.tar")
    }

    /// The argument `IMAGE:/PATH`.
    pub(crate) fn at(&self, path: &[u8]) -> OsString {
        use std::os::unix::ffi::OsStringExt;
        let mut text = self.image().into_os_string().into_vec();
        text.push(b':');
        text.extend_from_slice(path);
        OsString::from_vec(text)
    }

    /// Fails if anything except the target changed.
    pub(crate) fn check(&self, what: &str) {
        assert_eq!(self.all_around(), self.around, "{what} changed something outside of its target");
    }

    /// Empties the target.
    pub(crate) fn clear(&self) {
        let target = self.target();
        fs::remove_dir_all(&target).expect("the target can be removed");
        fs::create_dir(&target).expect("the target can be made again");
    }

    /// All files except the image, the archive and the content of the target.
    fn all_around(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut todo = vec![self.top.clone()];
        let (image, archive, target) = (self.image(), self.archive(), self.target());
        while let Some(dir) = todo.pop() {
            for entry in fs::read_dir(&dir).expect("the scratch directory can be read") {
                let entry = entry.expect("an entry");
                let path = entry.path();
                if [&image, &archive].contains(&&path) {
                    continue;
                }
                let is_dir = entry.file_type().expect("a type").is_dir();
                found.insert(path.clone(), content(&path, is_dir));
                if is_dir && path != target {
                    todo.push(path);
                }
            }
        }
        found
    }
}

fn content(path: &Path, is_dir: bool) -> Vec<u8> {
    if is_dir { Vec::new() } else { fs::read(path).expect("a sentinel can be read") }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.top);
    }
}
