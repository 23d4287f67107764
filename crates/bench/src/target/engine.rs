//! [`EngineTarget`]: images opened in this process, with crate `fs` and without a mount.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use ubtrfs_control::{Channel, Request};
use ubtrfs_device::{Access, Device, FileDevice, NamedDevice};
use ubtrfs_format::item::{FileType, Timespec};
use ubtrfs_format::{Profile, RootId};
use ubtrfs_fs::{
    Caller, Fs, InodeId, Job, Metric, MountOptions, NewInode, ReceiveOptions, RenameFlags, SendRequest, SetAttr,
    SetTime,
};

use ubtrfs_mkfs::{MkfsOptions, make_array};

use super::{Admin, BenchTarget, EntryKind, Meta};

/// An open filesystem.
#[derive(Debug)]
pub(crate) struct EngineTarget {
    fs: Arc<Fs>,
}

/// An open inode, which is released on drop.
#[derive(Debug)]
pub(crate) struct EngineFile {
    fs: Arc<Fs>,
    id: InodeId,
}

impl Drop for EngineFile {
    fn drop(&mut self) {
        self.fs.release_inode(self.id);
    }
}

impl EngineTarget {
    /// Opens the filesystem on these images; `degraded` as in `mount -o degraded`.
    pub(crate) fn open(images: &[PathBuf], degraded: bool, memory_bytes: Option<u64>) -> Result<Self> {
        let mut devices: Vec<Arc<dyn Device>> = Vec::with_capacity(images.len());
        for image in images {
            devices.push(Arc::new(NamedDevice::open(image, Access::ReadWrite)?));
        }
        let mut options = MountOptions { degraded, ..MountOptions::default() };
        if let Some(bytes) = memory_bytes {
            options.memory_bytes = bytes;
        }
        let first = images.first().map(|image| image.display().to_string()).unwrap_or_default();
        let fs = Fs::open(devices, options).with_context(|| format!("cannot open {first}"))?;
        if let Some(reason) = fs.read_only() {
            bail!("{first} cannot be changed: {reason}");
        }
        Ok(Self { fs })
    }

    pub(crate) fn close(self) -> Result<()> {
        Ok(self.fs.close()?)
    }

    fn file(&self, id: InodeId) -> Result<EngineFile> {
        self.fs.open_inode(id)?;
        Ok(EngineFile { fs: Arc::clone(&self.fs), id })
    }
}

/// The layout of a new filesystem; `None` is the default of mkfs.
#[derive(Clone, Debug, Default)]
pub(crate) struct MkfsLayout {
    /// Size of each image, which is sparse.
    pub(crate) image_bytes: u64,
    /// Size of a tree block in bytes.
    pub(crate) nodesize: Option<u32>,
    /// Profile of data, as for `mkfs -d`.
    pub(crate) data: Option<String>,
    /// Profile of metadata, as for `mkfs -m`.
    pub(crate) metadata: Option<String>,
}

/// Makes image files, and a filesystem on them.
pub(crate) fn make_images(paths: &[PathBuf], layout: &MkfsLayout) -> Result<()> {
    let create = |path: &PathBuf| FileDevice::create(path, layout.image_bytes, true);
    let devices = paths.iter().map(create).collect::<Result<Vec<_>, _>>()?;
    let devices: Vec<&dyn Device> = devices.iter().map(|device| device as &dyn Device).collect();
    let profile = |name: &String| Profile::named(name).with_context(|| format!("there is no profile {name}"));
    let mut options = MkfsOptions::default();
    if let Some(data) = &layout.data {
        options.data_profile = profile(data)?.flag;
    }
    if let Some(metadata) = &layout.metadata {
        options.metadata_profile = profile(metadata)?.flag;
    }
    options.nodesize = layout.nodesize.unwrap_or(options.nodesize);
    make_array(&devices, &options).context("cannot format the images")?;
    Ok(())
}

fn set_attr(meta: &Meta) -> SetAttr {
    let time = Some(SetTime::At(Timespec { sec: meta.mtime, nsec: 0 }));
    let (uid, gid) = (Some(meta.uid), Some(meta.gid));
    SetAttr { mode: Some(meta.mode), uid, gid, atime: time, mtime: time, ..SetAttr::default() }
}

impl BenchTarget for EngineTarget {
    type Dir = InodeId;
    type File = EngineFile;

    fn root(&self) -> Result<InodeId> {
        Ok(self.fs.root())
    }

    fn mkdir(&self, dir: &InodeId, name: &[u8], mode: u32) -> Result<InodeId> {
        Ok(self.fs.create(*dir, name, NewInode::dir(mode), &Caller::ROOT)?.id)
    }

    fn child(&self, dir: &InodeId, name: &[u8]) -> Result<InodeId> {
        Ok(self.fs.lookup(*dir, name)?.id)
    }

    fn create(&self, dir: &InodeId, name: &[u8], mode: u32) -> Result<EngineFile> {
        self.file(self.fs.create(*dir, name, NewInode::file(mode), &Caller::ROOT)?.id)
    }

    fn create_empty(&self, dir: &InodeId, name: &[u8], mode: u32) -> Result<()> {
        self.fs.create(*dir, name, NewInode::file(mode), &Caller::ROOT)?;
        Ok(())
    }

    fn open(&self, dir: &InodeId, name: &[u8], _write: bool) -> Result<EngineFile> {
        self.file(self.fs.lookup(*dir, name)?.id)
    }

    fn write(&self, file: &EngineFile, mut offset: u64, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let count = self.fs.write(file.id, offset, data)?;
            if count == 0 {
                bail!("write wrote nothing");
            }
            offset += count as u64;
            data = &data[count.min(data.len())..];
        }
        Ok(())
    }

    fn read(&self, file: &EngineFile, offset: u64, buf: &mut [u8]) -> Result<usize> {
        Ok(self.fs.read_into(file.id, offset, buf)?)
    }

    fn fsync(&self, file: &EngineFile) -> Result<()> {
        Ok(self.fs.fsync(file.id, false)?)
    }

    fn set_meta(&self, file: &EngineFile, meta: &Meta) -> Result<()> {
        self.fs.setattr(file.id, &set_attr(meta), &Caller::ROOT)?;
        Ok(())
    }

    fn set_meta_at(&self, dir: &InodeId, name: &[u8], meta: &Meta, kind: EntryKind) -> Result<()> {
        let id = self.fs.lookup(*dir, name)?.id;
        let mut set = set_attr(meta);
        if kind != EntryKind::Dir {
            set.mode = None;
        }
        self.fs.setattr(id, &set, &Caller::ROOT)?;
        Ok(())
    }

    fn symlink(&self, dir: &InodeId, name: &[u8], target: &[u8]) -> Result<()> {
        self.fs.create(*dir, name, NewInode::symlink(target), &Caller::ROOT)?;
        Ok(())
    }

    fn link(&self, from: (&InodeId, &[u8]), to: (&InodeId, &[u8])) -> Result<()> {
        let id = self.fs.lookup(*from.0, from.1)?.id;
        self.fs.link(id, *to.0, to.1)?;
        Ok(())
    }

    fn list(&self, dir: &InodeId) -> Result<Vec<(Vec<u8>, EntryKind)>> {
        let mut names = Vec::new();
        self.fs.readdir(*dir, 0, &mut |entry| {
            if entry.name != b"." && entry.name != b".." {
                let kind = if entry.file_type == FileType::Directory { EntryKind::Dir } else { EntryKind::Other };
                names.push((entry.name.to_vec(), kind));
            }
            true
        })?;
        Ok(names)
    }

    fn stat(&self, dir: &InodeId, name: &[u8]) -> Result<u64> {
        Ok(self.fs.lookup(*dir, name)?.size)
    }

    fn unlink(&self, dir: &InodeId, name: &[u8]) -> Result<()> {
        Ok(self.fs.unlink(*dir, name)?)
    }

    fn rmdir(&self, dir: &InodeId, name: &[u8]) -> Result<()> {
        Ok(self.fs.rmdir(*dir, name)?)
    }

    fn rename(&self, dir: &InodeId, name: &[u8], new_name: &[u8]) -> Result<()> {
        Ok(self.fs.rename(*dir, name, *dir, new_name, RenameFlags::empty())?)
    }

    fn make_subvolume(&self, dir: &InodeId, name: &[u8]) -> Result<InodeId> {
        Ok(self.fs.create_subvolume(*dir, name, &Caller::ROOT)?)
    }

    fn snapshot(&self, dir: &InodeId, source: &[u8], name: &[u8]) -> Result<()> {
        let source = self.fs.lookup(*dir, source)?.id.root;
        self.fs.snapshot(source, *dir, name, true)?;
        Ok(())
    }

    fn delete_subvolume(&self, dir: &InodeId, name: &[u8]) -> Result<()> {
        Ok(self.fs.delete_subvolume(*dir, name, None)?)
    }

    fn send(&self, dir: &InodeId, name: &[u8], parent: Option<&[u8]>, output: &Path) -> Result<()> {
        let subvolume = |name: &[u8]| -> Result<RootId> { Ok(self.fs.lookup(*dir, name)?.id.root) };
        let request = SendRequest {
            subvolumes: vec![subvolume(name)?],
            parent: parent.map(subvolume).transpose()?,
            clone_sources: Vec::new(),
            version: 1,
            compressed_data: false,
            no_data: false,
            joined: false,
        };
        let mut output = super::open_to_append(output)?;
        Ok(self.fs.send(&request, &mut output, &Job::new())?)
    }

    fn receive(&self, dir: &InodeId, stream: &Path) -> Result<()> {
        self.fs.receive(*dir, File::open(stream)?, &ReceiveOptions::default(), &Job::new(), &mut |_| {})?;
        Ok(())
    }

    fn engine_metrics(&self) -> BTreeMap<String, f64> {
        let single = self.fs.metrics().into_iter().filter(|metric| metric.suffix != "_bucket");
        let name = |metric: &Metric| {
            let labels = metric.labels.iter().map(|(_, value)| format!(" {value}")).collect::<String>();
            format!("{}{labels}", metric.full_name())
        };
        single.map(|metric| (name(&metric), metric.value)).collect()
    }

    fn run_task(&self, what: Admin) -> Result<()> {
        use ubtrfs_control::balance::{Filters, Request as Balance, StartBalance};
        use ubtrfs_control::quota::Request as Quota;
        let channel = Channel::image(&self.fs, 0, 0);
        let all = || Some(Filters::default());
        let start = match what {
            Admin::BalanceMetadata => StartBalance { metadata: all(), system: all(), ..StartBalance::default() },
            Admin::BalanceData => StartBalance { data: all(), ..StartBalance::default() },
            Admin::ConvertDup => {
                let filters = Filters { convert: Some("dup".to_owned()), ..Filters::default() };
                StartBalance { data: Some(filters), ..StartBalance::default() }
            }
            Admin::EnableQuotas => {
                channel.call(Request::Quota(Quota::Enable { simple: false }), &[])?;
                channel.call(Request::Quota(Quota::RescanWait), &[])?;
                return Ok(());
            }
        };
        channel.call(Request::Balance(Balance::Start(Box::new(start))), &[])?;
        Ok(())
    }

    /// Writes out all data and commits.
    fn sync(&self) -> Result<()> {
        Ok(self.fs.sync()?)
    }
}
