src=open("scratch_gpu.py").read(); src=src[:src.index('# fingerprint')]; exec(src)
import mmap, threading, cProfile, pstats
from laststep.engine import memory
D="/tmp/gpurun"; shutil.rmtree(D,ignore_errors=True)
print(open("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read(), open("/sys/kernel/mm/transparent_hugepage/enabled").read())
REQ=16<<20; n=300
def bufs(kind):
    if kind=="anon": return [memoryview(mmap.mmap(-1,REQ)) for _ in range(24)]
    fd=memory.create(24*REQ); M=memory.Mapping(fd,24*REQ); M.populate(0,24*REQ); return [M.view[i*REQ:(i+1)*REQ] for i in range(24)]
B={k:bufs(k) for k in("anon","memfd")}
for k in B:
    for b in B[k]: b[:]=os.urandom(1<<20)*16
def io(kind,write,threads=4):
    bs=B[kind]
    if write and os.path.exists("/tmp/raw"): os.unlink("/tmp/raw")
    fd=os.open("/tmp/raw",(os.O_CREAT|os.O_WRONLY if write else os.O_RDONLY)|os.O_DIRECT)
    def w(k):
        j=0
        for i in range(k,n,threads):
            b=bs[(k*6+j)%24]; j=(j+1)%6
            if write: os.pwrite(fd,b,i*REQ)
            else: os.preadv(fd,[b],i*REQ)
    t=time.perf_counter(); th=[threading.Thread(target=w,args=(k,)) for k in range(threads)]; [x.start() for x in th]; [x.join() for x in th]
    if write: os.fsync(fd)
    dt=time.perf_counter()-t; os.close(fd); return round(n*REQ/dt/1e9,2)
for rep in range(3): print({(k,w):io(k,w) for w in (1,0) for k in ("anon","memfd")})
os.unlink("/tmp/raw")
ck=laststep.Checkpointer(D,model=m,optimizer=opt); timed(12); ck._pool.wait_ready()
for k in range(4):
    torch.cuda.current_stream().synchronize(); h=ck.save(1000+k); h.wait(); r=h.report
    print("  stall %.1f devcopy %.1f captured %.0f written %.0f durable %.0f ms -> %.2f GB/s"%(r.stall_s*1e3,r.device_copy_s*1e3,r.captured_s*1e3,r.written_s*1e3,r.durable_s*1e3,r.size_bytes/r.durable_s/1e9))
pr=cProfile.Profile(); pr.enable(); h=ck.save(999); pr.disable(); h.wait(); pstats.Stats(pr).sort_stats("tottime").print_stats(28)
for threads in (4,6,4,6):
    m2=state(); o2=torch.optim.AdamW(m2.parameters(),foreach=True)
    ck2=laststep.Checkpointer(D,model=m2,optimizer=o2,writers=threads); ck2._pool.wait_ready()
    os.system("sync; echo 3 > /proc/sys/vm/drop_caches")
    t=time.perf_counter(); rr=ck2.restore(); torch.cuda.synchronize(); dt=time.perf_counter()-t
    os.rename(f"{D}/{rr.folder}/optimizer.safetensors","/tmp/raw")
    n=os.path.getsize("/tmp/raw")//REQ; print(threads,"restore GB/s", round(tot/dt/1e9,2), "raw read", io("anon",0), io("memfd",0)); os.rename("/tmp/raw",f"{D}/{rr.folder}/optimizer.safetensors")
    ck2.close(); del m2,o2,ck2
ck.close()
