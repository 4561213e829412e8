src=open("scratch_gpu.py").read(); src=src[:src.index('# fingerprint')]; exec(src)
import threading, collections
D="/tmp/gpurun"; shutil.rmtree(D,ignore_errors=True)
ck=laststep.Checkpointer(D,model=m,optimizer=opt); timed(12); ck._pool.wait_ready()
for k in range(5):
    for _ in range(3): iteration(N)
    s=torch.cuda.current_stream(); s.synchronize(); t=time.perf_counter(); h=ck.save(1000+k); t1=time.perf_counter(); s.synchronize(); t2=time.perf_counter(); h.wait(); r=h.report
    print("  save() %.1f until stream idle %.1f devcopy %.1f captured %.0f written %.0f durable %.0f ms -> %.2f GB/s"%((t1-t)*1e3,(t2-t)*1e3,r.device_copy_s*1e3,r.captured_s*1e3,r.written_s*1e3,r.durable_s*1e3,r.size_bytes/r.durable_s/1e9))
import laststep.engine.read as RD
T=collections.Counter()
def wrap(obj,name,label):
    f=getattr(obj,name)
    def g(*a,**k):
        t=time.perf_counter(); x=f(*a,**k); T[label]+=time.perf_counter()-t; T[label+"#"]+=1; return x
    setattr(obj,name,g)
wrap(RD,"_fill","read"); wrap(RD,"_verify","verify")
import laststep.engine.copy.place as PL
wrap(PL.Placer,"deliver","deliver"); wrap(RD._Pipeline,"_lease","lease")
for threads in (4,4,8):
    T.clear()
    m2=state(); o2=torch.optim.AdamW(m2.parameters(),foreach=True)
    ck2=laststep.Checkpointer(D,model=m2,optimizer=o2,writers=threads); ck2._pool.wait_ready()
    os.system("sync; echo 3 > /proc/sys/vm/drop_caches")
    t=time.perf_counter(); rr=ck2.restore(); torch.cuda.synchronize(); dt=time.perf_counter()-t
    print(threads,"restore GB/s", round(tot/dt/1e9,2), {k:round(v,2) for k,v in T.items()})
    ck2.close(); del m2,o2,ck2
ck.close()
